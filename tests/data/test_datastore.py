"""Of the texts that drafts are retrieved from, those of least perplexity under the target."""

import random

import pytest
import torch
from tests.commands import refused
from tests.tiny import VOCABULARY, tiny_target

from slipstream.data.datastore import perplexities, refined
from slipstream.data.rendering import Sample


def test_the_texts_of_least_perplexity_stay():
    """exp of the mean negative log-probability of a completion's tokens, by a plain forward; texts
    beyond the context have none, and do not stay."""
    chance, target = random.Random(0), tiny_target()
    lengths = [chance.randrange(6, 40) for _ in range(12)]
    samples = [Sample(chance.choices(range(4, VOCABULARY), k=length), 3) for length in lengths]
    expected = []
    for sample in samples:
        logits = target.model(torch.tensor([sample.ids])).logits[0].log_softmax(-1)
        own = [logits[place - 1, sample.ids[place]] for place in range(3, len(sample.ids))]
        expected.append(torch.stack(own).mean().neg().exp().item())
    assert perplexities(samples, target) == pytest.approx(expected, rel=1e-4)
    least = sorted(range(12), key=expected.__getitem__)[:3]
    assert refined(samples, target, 0.25) == [samples[place] for place in sorted(least)]
    assert refined(samples, target, 1.0) == samples
    long = Sample([5] * (target.max_positions + 1), 3)
    assert refined([long, *samples], target, 0.25) == refined(samples, target, 0.25)
    assert "fits the target's context" in refused(lambda: refined([long], target, 0.5))
