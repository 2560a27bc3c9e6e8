"""Exact sampling: every drafter, chains and trees, every sampling setting, alone and in a batch.

By enumeration, as in `test_every_option_samples.py`: each of the 27 continuations of a prompt must
come with the probability that one token per forward of the plain model gives it.
"""

from itertools import product

import pytest
import torch
from tests.core.test_exact_sampling import EnumeratedRandomness, enumerated
from tests.decoding.test_every_option_samples import (
    COUNT,
    FIRST,
    PROMPT,
    TOLERANCE,
    VOCABULARY,
    AfterFirst,
    expected,
)
from tests.drafters import untrained
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core.sampling import Sampling, SeededRandomness
from slipstream.decoding import decoder
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.streaming import Streaming

SAMPLINGS = {
    "temperature": Sampling(0.8),
    "top_k": Sampling(1.0, top_k=2),
    "top_p": Sampling(1.0, top_p=0.8),
    "all": Sampling(0.7, top_k=2, top_p=0.9),
}
RULES = [
    *(f"deferred trees, {name}" for name in untrained.STREAM_RULES),
    *(f"fused chains, {name}" for name in untrained.STREAM_RULES),
    *(f"prompt lookup, {name}" for name in untrained.NGRAM_RULES),
    *(f"adaptive n-grams, {name}" for name in untrained.NGRAM_RULES),
]
WAYS = {
    "plain": None,
    "fused chain": ("fused", 1, 4),
    "fused tree": ("fused", 2, 7),
    "deferred chain": ("deferred", 1, 4),
    "deferred tree": ("deferred", 2, 7),
    "shared chain": ("fused", 1, 4),
    "shared tree": ("fused", 2, 7),
    "draft model": 4,
} | dict.fromkeys(
    [*untrained.untrained([]), *RULES, "combined with streams, fused", "combined with streams"], 7
)
LEARNING = ("kept", "combined")
"""Drafters whose later answers know of earlier ones begin anew for every outcome of chance."""
COMPANIONS = ([2, 2, 0, 1, 2, 2, 1], [0])
"""Other prompts of a batch, longer and shorter."""


@pytest.fixture(autouse=True)
def chance_is_handed_in_as_the_seed(monkeypatch):
    monkeypatch.setattr(decoder, "SeededRandomness", lambda randomness: randomness)


def decoder_of(way: str, target, speculator, sampling: Sampling):
    limits = Limits(1 + COUNT)
    if way == "plain":
        return PlainDecoder(target, sampling, limits)
    if way == "draft model":
        draft = tiny_target(seed=8, vocab_size=VOCABULARY)
        return Engine(target, DraftModel(draft, num_tokens=3), sampling, limits, WAYS[way])
    if way.startswith("combined with streams"):
        schedule = "fused" if way.endswith("fused") else "deferred"
        drafter = untrained.combined(speculator, schedule)
        return Engine(target, drafter, sampling, limits, WAYS[way])
    drafters = untrained.untrained([[0, 1, 2, 2, 1, 0, 0, 2, 1], [2, 0, 1, 1, 2, 0]])
    drafters |= untrained.with_rules(target, speculator, top_k=2)
    if way in drafters:
        return Engine(target, drafters[way], sampling, limits, WAYS[way])
    schedule, top_k, budget = WAYS[way]
    return Engine(target, Streaming(speculator, schedule, top_k), sampling, limits, budget)


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
@pytest.mark.parametrize(("way", "setting"), list(product(WAYS, SAMPLINGS)))
def test_every_continuation_has_the_probability_of_one_token_per_forward(way, setting, batched):
    target = tiny_target(seed=3, vocab_size=VOCABULARY)
    mode = "shared" if way.startswith("shared") else "lossless"
    speculator = tiny_speculator(target, seed=2, num_streams=3, mode=mode)
    sampling = SAMPLINGS[setting]
    decoding = decoder_of(way, target, speculator, sampling)
    learning = any(word in way for word in LEARNING)
    prompts = [COMPANIONS[0], PROMPT, COMPANIONS[1]] if batched else [PROMPT]
    joint = torch.zeros([VOCABULARY] * COUNT, dtype=torch.float64)

    def outcome(randomness: EnumeratedRandomness) -> tuple:
        nonlocal decoding
        if learning:
            decoding = decoder_of(way, target, speculator, sampling)
        chance = AfterFirst(randomness)
        seeds = [SeededRandomness(1), chance, SeededRandomness(2)] if batched else [chance]
        answers = decoding.generate_batch(prompts, seeds)
        first, *others = answers[prompts.index(PROMPT)].ids
        assert first == FIRST
        return tuple(others)

    for continuation, probability in enumerated(outcome).items():
        joint[continuation] = probability
    exact = expected(target, speculator, sampling)
    assert 0 < exact.max() < 0.75
    torch.testing.assert_close(joint.flatten(), exact, rtol=0, atol=TOLERANCE)
