"""Answers as they are decided: `slipstream.stream`, and conversations on the terminal."""

import re
from collections.abc import Iterator
from io import StringIO
from itertools import product

import pytest
from rich.console import Console
from tests.commands import config_of, refused
from tests.exhaustive import sparing
from tests.tiny import save_tiny_target

import slipstream
from slipstream import app
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.speculators.checkpoint import from_pretrained
from slipstream.targets.loading import load_target

PROMPT = "name[The Punter], eatType[pub], food[Italian], priceRange[cheap], area[riverside]"
OTHER = "name[The Mill], eatType[coffee shop], food[English]"


@pytest.fixture(scope="module")
def small():
    return load_target("slipstream/small-target")


def told(pieces: Iterator[str]):
    """All pieces, and what comes with their end."""
    found = []
    while True:
        try:
            found.append(next(pieces))
        except StopIteration as ended:
            return found, ended.value


DRAFTERS = "slipstream/small-streaming", "auto", None


@pytest.mark.parametrize(
    ("prompt", "drafter", "temperature"),
    sparing(
        product((PROMPT, [{"role": "user", "content": PROMPT}]), DRAFTERS, (0.0, 0.8)),
        lambda prompt, drafter, _: prompt == PROMPT or drafter == "auto",
    ),
)
def test_pieces_add_up_to_the_answer(small, prompt, drafter, temperature):
    given = dict(max_new_tokens=32, temperature=temperature, seed=3)
    expected = slipstream.generate(prompt, small, None, **given)
    pieces, answer = told(slipstream.stream(prompt, small, drafter, **given))
    assert "".join(pieces) == answer.text == expected.text and answer.ids == expected.ids
    assert all(pieces) and len(pieces) > 3
    if drafter is None:
        assert answer.statistics.tau == 1
    elif drafter != "auto":  # which may find that drafts do not pay
        assert answer.statistics.tau > 1.5 and len(pieces) < len(answer.ids)


def test_a_piece_comes_before_the_next_step_and_leaving_ends_the_work(small, monkeypatch):
    steps, advance = [], Engine._step
    monkeypatch.setattr(Engine, "_step", lambda *given: steps.append(1) or advance(*given))
    pieces = slipstream.stream(PROMPT, small)
    assert not steps
    next(pieces)
    assert len(steps) == 0  # the first token is the prompt's
    next(pieces)
    assert 1 <= len(steps) <= 2
    pieces.close()
    assert len(steps) <= 2


def test_a_stop_string_ends_the_pieces(small):
    whole = slipstream.generate(PROMPT, small).text
    stop = whole.split()[4]
    assert "".join(slipstream.stream(PROMPT, small, stop=stop)) == whole[: whole.find(stop)]


@pytest.mark.parametrize("prompt", [5, None, [], [PROMPT, OTHER], [[]]])
def test_one_prompt_is_asked_for_at_the_call(small, prompt):
    assert "prompt: give one text" in refused(lambda: slipstream.stream(prompt, small))


@pytest.fixture
def typing(monkeypatch):
    """Lets somebody type these lines, and then nothing more."""

    def types(*lines):
        left = iter(lines)

        def line(*_):
            found = next(left, None)
            if found is None:
                raise EOFError
            return found

        monkeypatch.setattr("builtins.input", line)
        return left

    return types


@pytest.fixture
def asked(monkeypatch):
    """The prompts that were answered, and the answers."""
    seen, answer = [], Engine.generate

    def generate(engine, ids, *more):
        seen.append((ids, answer(engine, ids, *more)))
        return seen[-1][1]

    monkeypatch.setattr(Engine, "generate", generate)
    return seen


def test_a_conversation_goes_on_from_its_own_answers(small, typing, asked, capsys):
    typing(OTHER, PROMPT)
    slipstream.chat(small)
    (_, first), (second, last) = asked
    messages = [
        {"role": "user", "content": OTHER},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": PROMPT},
    ]
    assert second == render_prompt(small.tokenizer, messages)
    printed = capsys.readouterr().out
    assert first.text in printed and last.text in printed
    for answer in (first, last):
        assert f"{answer.statistics.drafted} of them drafted, tau {answer.statistics.tau:.2f}" in (
            " ".join(printed.split())
        )


def test_drafted_tokens_are_green_and_the_targets_own_yellow(small, typing, asked, monkeypatch):
    screen = Console(file=StringIO(), force_terminal=True, color_system="standard", width=200)
    monkeypatch.setattr("slipstream.evaluation.run.Console", lambda: screen)
    typing(OTHER)
    slipstream.chat(small, max_new_tokens=24)
    ((ids, _),) = asked
    attached = from_pretrained("slipstream/small-streaming").attached(small)
    decoder = Engine(small, attached, Sampling(), Limits(24), 12)
    expected = []
    decoder.generate(ids, 0, lambda _, drafted, piece: expected.append((drafted, piece)))
    shown = re.findall(r"\x1b\[(32|1;33)m(.*?)\x1b\[0m", screen.file.getvalue())
    told = [(style == "32", piece) for style, piece in shown][: len(shown) - 2]  # of the legend
    assert told == [each for each in expected if each[1]]
    assert {drafted for drafted, _ in told} == {True, False}


@pytest.mark.parametrize("ending", ["", "  ", "exit"])
def test_an_empty_line_or_exit_ends_it(small, typing, asked, ending):
    left = typing(OTHER, ending, PROMPT)
    slipstream.chat(small, drafter="auto", max_new_tokens=4)
    assert len(asked) == 1 and next(left) == PROMPT


def test_a_conversation_that_outgrows_the_context_starts_anew(tmp_path, typing, asked, capsys):
    """A tiny target of 128 positions whose template puts one word before each message."""
    target = load_target(str(save_tiny_target(tmp_path / "target")), device="cpu", packed=False)
    target.tokenizer.chat_template = "{% for each in messages %}{{ each['content'] }} {% endfor %}"
    long = " ".join(["w5 w6"] * 40)
    typing(long, long, long)
    slipstream.chat(target, "prompt_lookup", max_new_tokens=10)
    assert [len(ids) for ids, _ in asked] == [80, 80]
    assert "the conversation starts anew" in " ".join(capsys.readouterr().out.split())
    typing(long * 2)
    assert "do not fit the target's context" in refused(lambda: slipstream.chat(target, None))


def test_the_command_converses_as_well(typing, asked, capsys):
    typing(OTHER)
    assert app.infer(config_of("infer", "chat=true", "limits.max_new_tokens=8")) == []
    assert asked[0][1].text in capsys.readouterr().out


@pytest.mark.parametrize("other", ["prompt=Hi", "calibrate=true", "verify=true"])
def test_a_conversation_goes_with_nothing_else(other):
    assert "chat" in refused(lambda: app.infer(config_of("infer", "chat=true", other)))
