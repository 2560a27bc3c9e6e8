"""The prompts that are decoded: of files, of the hub, or generated."""

import json

import pytest
from tests.commands import config_of

from slipstream import app
from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.hub import HubSource
from slipstream.data.rendering import render_prompt
from slipstream.data.rows import Row, messages_of, read_rows
from slipstream.decoding.answer import Limits
from slipstream.decoding.plain import PlainDecoder
from slipstream.evaluation.prompts import Prompt, PromptSets, fitting, with_later_turns
from slipstream.targets.loading import load_target


class Hub(HubSource):
    def rows(self, split: str, _: bool) -> list[Row]:
        return [Row(f"{split} {n // 2}", f"{n}", self.source) for n in range(6)]


HUB = {name: Hub("owner/set", "", "", name) for name in ("a", "b")}


def test_prompts_of_the_hub_come_in_turn_once_each_with_all_their_references():
    found = PromptSets(None, HUB, None, "test", 0).take(4)
    assert [(prompt.source, prompt.text, prompt.references) for prompt in found] == [
        ("a", "test 0", ("0", "1")),
        ("b", "test 0", ("0", "1")),
        ("a", "test 1", ("2", "3")),
        ("b", "test 1", ("2", "3")),
    ]


def test_a_path_wins_over_the_hub_and_the_split_is_that_asked_for(tmp_path):
    for split in ("test", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"prompt": split}))
        assert PromptSets(str(tmp_path), HUB, None, split, 0).take(1)[0].text == split
        assert PromptSets(None, HUB, None, split, 0).take(1)[0].text == f"{split} 0"


def test_what_a_single_file_is_good_for_is_told(tmp_path, capsys):
    """Its prompts are those of both splits."""
    for split in ("test", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"prompt": split}))
        PromptSets(str(tmp_path), None, None, split, 0).take(1)
        PromptSets(str(tmp_path / "test.jsonl"), None, None, split, 0).take(1)
        told = capsys.readouterr().out
        assert ("measure what is chosen by them on others" in told) == (split == "validation")


def test_a_split_that_is_trained_on_is_refused():
    with pytest.raises(InputError, match=r"data\.split: must be one of test, validation"):
        app.infer(config_of("infer", "data.split=train"))


@pytest.mark.parametrize("answer", ["Two.", [{"role": "assistant", "content": "Two."}]])
def test_conversations_may_be_split_into_prompt_and_completion(tmp_path, answer):
    asked = [{"role": "user", "content": "One?"}]
    for completion, found in ((answer, "Two."), (None, "")):
        row = {"prompt": asked, "completion": completion}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        (row,) = read_rows(tmp_path / "rows.jsonl", "train", completion_required=False)
        assert (row.prompt, row.completion) == (asked, found)
    for wrong in ({"prompt": asked, "completion": 5}, {"prompt": ["One?"], "completion": "Two."}):
        (tmp_path / "rows.jsonl").write_text(json.dumps(wrong))
        with pytest.raises(InputError, match=r"line 1: messages\[\d\]: it has no text"):
            read_rows(tmp_path / "rows.jsonl", "train")


def test_conversations_are_prompts_and_are_cut_in_their_last_message(tmp_path):
    asked = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    rows = [
        {"messages": [*asked, {"role": "user", "content": "word " * 40}]},
        {"messages": [*asked, {"role": "user", "content": "Three?"}, asked[1]]},
        {"messages": [*asked, {"role": "user", "content": "Three?"}]},
    ]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    long, short = PromptSets(str(tmp_path), None, None, "test", 0).take(3)
    assert short.text == rows[2]["messages"] and short.references == ("Two.",)
    target = load_target("slipstream/small-target", device="cpu")
    cut, whole = fitting([long, short], target, cut_to=30)
    assert whole == short and cut.text[:2] == asked
    assert len(render_prompt(target.tokenizer, cut.text)) <= 30
    assert 0 < len(cut.question) < len(long.question)
    for most in range(20, 23):  # of a character that is several tokens, part is never left
        (cut,) = fitting([Prompt("\u65e5" * 60, "a")], target, cut_to=most)
        assert (
            set(cut.text) == {"\u65e5"} and len(render_prompt(target.tokenizer, cut.text)) <= most
        )


def questions(tmp_path):
    lines = [
        {"category": "writing", "turns": ["One?", "Two?", "Three?"]},
        {"category": "math", "turns": ["1 + 1?"]},
        {"category": "writing", "turns": ["Four?", "word " * 1100]},
    ]
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(folder / "questions.jsonl")


def test_categories_are_sets_of_their_own_if_asked_for(tmp_path):
    path = questions(tmp_path)
    found = PromptSets(path, None, None, "test", 0, categories=True).take(4)
    assert [(prompt.source, prompt.text, prompt.later) for prompt in found] == [
        ("bench/writing", "One?", ()),
        ("bench/math", "1 + 1?", ()),
        ("bench/writing", "Four?", ()),
    ]
    assert {prompt.source for prompt in PromptSets(path, None, None, "test", 0).take(3)} == {
        "bench"
    }


def test_later_turns_follow_the_targets_own_answers(tmp_path, capsys):
    """All turns of the first conversation, and none that has no room left."""
    target = load_target("slipstream/small-target", device="cpu")
    prompts = PromptSets(questions(tmp_path), None, None, "test", 0, turns=3).take(3)
    limits, asked = Limits(8), []
    for prompt in with_later_turns(prompts, target, limits):
        asked.append([message["content"] for message in messages_of(prompt.text)])
    decoder = PlainDecoder(target, Sampling(), limits)
    first = decoder.generate(render_prompt(target.tokenizer, "One?")).text
    two = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": first}]
    two += [{"role": "user", "content": "Two?"}]
    second = decoder.generate(render_prompt(target.tokenizer, two)).text
    conversation = ["One?", first, "Two?", second, "Three?"]
    shown = [conversation[:1], ["1 + 1?"], ["Four?"], conversation[:3], conversation]
    assert sorted(asked) == sorted(shown)
    assert "1 later turns are left out" in capsys.readouterr().out
    fits = with_later_turns(prompts, target, limits, cut_to=100)
    assert len(fits) == 6 and len(render_prompt(target.tokenizer, fits[-1].text)) <= 100
