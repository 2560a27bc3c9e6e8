"""References know the logits behind each of their tokens."""

import pytest
from tests.tiny import tiny_speculator, tiny_target

from slipstream.decoding.answer import Limits
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.exactness import DraftlessReference, PlainReference, first_divergence


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
