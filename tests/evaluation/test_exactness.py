"""References know the logits behind each of their tokens."""

import pytest
import torch
from tests.tiny import reading_target, tiny_speculator, tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.exactness import (
    TIE_UNITS,
    DraftlessReference,
    PlainReference,
    first_divergence,
)
from slipstream.evaluation.methods import Plain
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.run import verify_methods


@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_a_divergence_is_told_by_the_logits_of_its_position(mode):
    target, limits, prompt = tiny_target(), Limits(16), [3, 1, 4, 1, 5]
    reference = PlainReference(target, limits)
    if mode == "shared":
        drafter = Streaming(tiny_speculator(target, mode="shared"), "fused", 2)
        reference = DraftlessReference(target, drafter, limits)
    answer = reference.generate(prompt)
    assert [int(reference.logits(place).argmax()) for place in range(len(answer))] == answer
    assert first_divergence("method", 0, reference, prompt, list(answer)) is None
    for place in (0, 5, len(answer) - 1):
        wrong = [*answer[:place], (answer[place] + 1) % 40, *answer[place + 1 :]]
        found = first_divergence("method", 0, reference, prompt, wrong)
        assert (found.position, found.expected) == (place, answer[place])
        assert f"token {place} is" in found.sentence()


@pytest.mark.parametrize(
    ("dtype", "gap", "tie"),
    [
        (torch.bfloat16, 0.125, True),  # one unit
        (torch.bfloat16, 9.0, False),
        (torch.float16, 0.016, True),
        (torch.float16, 0.5, False),
        (torch.float32, 1e-4, True),
        (torch.float32, 1e-3, False),
    ],
)
def test_what_rounding_explains_depends_on_the_dtype(dtype, gap, tie):
    class Stub:
        def generate(self, prompt_ids):
            return [0]

        def logits(self, position):
            return torch.tensor([20.0, 20.0 - gap, 19.99, 0.0], dtype=dtype)

    found = first_divergence("method", 0, Stub(), [5], [1])
    assert (found.numeric_tie, found.gap) == (tie, pytest.approx(gap, rel=0.05))
    assert not first_divergence("method", 0, Stub(), [5], [3]).numeric_tie  # two others are tied
    assert not first_divergence("method", 0, Stub(), [5], [0, 1]).numeric_tie


class Wrong(Plain):
    """Its second token is another one."""

    def generate(self, prompts, seeds):
        answers = super().generate(prompts, seeds)
        for answer in answers:
            answer.ids[1] += 1
        return answers


@pytest.mark.parametrize(("units", "ties"), [(1e30, 2), (0.0, 0)])
def test_verification_counts_ties_apart_from_bugs(monkeypatch, capsys, units, ties):
    target = reading_target()
    monkeypatch.setitem(TIE_UNITS, target.dtype, units)
    prompts = [Prompt("w3 w5", "a"), Prompt("w8", "a")]
    methods = {"wrong": Wrong(), "plain": Plain()}
    found = verify_methods(methods, prompts, target, Sampling(), Limits(4), 0, 1)
    assert [each.numeric_tie for each in found] == [bool(ties)] * 2
    said = f"2 of 4 answers are identical to plain decoding (float64), {ties} leave it at a numeric"
    assert f"{said} tie, {2 - ties} by a bug" in capsys.readouterr().out
