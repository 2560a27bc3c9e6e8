"""Which prompts of a run are used: those that fit the context, and some to calibrate with."""

import pytest
from studies.decoding import divided
from tests.tiny import tiny_target, tiny_tokenizer

from slipstream.core.errors import InputError
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.evaluation.prompts import Prompt, PromptSets, fitting
from slipstream.targets.target import Target


@pytest.fixture
def target() -> Target:
    target = tiny_target("llama", max_position_embeddings=12)
    return Target(target.model, tiny_tokenizer(), "tiny")


def prompt_of(target: Target, count: int) -> Prompt:
    """A prompt of `count` tokens."""
    without = len(render_prompt(target.tokenizer, "w1")) - 1
    prompt = Prompt(" ".join(["w1"] * (count - without)), "words")
    assert len(render_prompt(target.tokenizer, prompt.text)) == count
    return prompt


def test_prompts_beyond_the_context_are_left_out_and_counted(target, capsys):
    prompts = [prompt_of(target, count) for count in (11, 12, 5, 30)]
    assert fitting(prompts, target) == [prompts[0], prompts[2]]
    assert "2 of 4 prompts are left out; they have more than 11 tokens" in capsys.readouterr().out
    assert fitting(prompts[:1], target) == prompts[:1]
    assert capsys.readouterr().out == ""


def test_no_prompt_that_fits_is_an_error(target):
    with pytest.raises(InputError, match="context of 12 tokens"):
        fitting([prompt_of(target, 12)], target)


def test_some_prompts_calibrate_and_at_least_one_is_measured():
    prompts = [Prompt(text, "words") for text in "abc"]
    assert divided(prompts, 1) == (prompts[:1], prompts[1:])
    with pytest.raises(InputError, match="leaves none of 3 to be measured"):
        divided(prompts, 3)


def test_what_cutting_leaves_nothing_of_is_left_out(target, capsys):
    """A conversation may fill the room before its last question."""
    before = [
        {"role": "user", "content": " ".join(["w1"] * 9)},
        {"role": "assistant", "content": "w2"},
    ]
    full = Prompt([*before, {"role": "user", "content": "w3 w4"}], "words")
    target.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    kept = fitting([full, Prompt("w5 w6", "words")], target, cut_to=8)
    assert [prompt.text for prompt in kept] == ["w5 w6"]
    assert "1 of 2 prompts are left out" in capsys.readouterr().out


def test_answers_that_fill_the_context_leave_no_prompt_to_cut(target):
    sets = PromptSets(None, None, ["data_to_text"], "test", 0, cut=True)
    with pytest.raises(InputError, match=r"^data.cut: answers of 12 tokens fill"):
        sets.take_for(target, Limits(12), 1)
