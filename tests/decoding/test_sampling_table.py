"""Exact sampling: every drafter, chains and trees, every sampling setting, alone and in a batch.

By enumeration, as in `test_every_option_samples.py`: each of the 27 continuations of a prompt must
come with the probability that one token per forward of the plain model gives it.
"""

from itertools import product

import pytest
from tests.decoding.test_every_option_samples import (
    COUNT,
    PROMPT,
    TOLERANCE,
    VOCABULARY,
    expected,
    first_token,
    found,
)
from tests.drafters import untrained
from tests.exhaustive import sparing
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core import verification
from slipstream.core.sampling import Sampling
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
DRAWN = {
    "fused chain, drawn": ("fused", 1, 3),
    "shared chain, drawn": ("fused", 1, 3),
    "deferred tree, drawn": ("deferred", 2, 4),
}
WAYS |= DRAWN
ONCE = [way for way, settings in WAYS.items() if settings != 7] + [
    "unispec",
    "combined with streams",
]
COMPANIONS = ([2, 2, 0, 1, 2, 2, 1], [0])
"""Other prompts of a batch, longer and shorter."""
pytestmark = pytest.mark.usefixtures("chance")


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
    drafter = Streaming(speculator, schedule, top_k, drawn=way in DRAWN)
    return Engine(target, drafter, sampling, limits, budget)


def largest_error(way: str, setting: str, batched: bool) -> float:
    """Of the probability of any continuation."""
    target = tiny_target(seed=3, vocab_size=VOCABULARY)
    mode = "shared" if way.startswith("shared") else "lossless"
    # Drawn, a tree has siblings as soon as levels end.
    streams = 2 if way in DRAWN else 3
    speculator = tiny_speculator(target, seed=2, num_streams=streams, mode=mode)
    sampling = SAMPLINGS[setting]
    decoder = decoder_of(way, target, speculator, sampling)
    prompts = [COMPANIONS[0], PROMPT, COMPANIONS[1]] if batched else [PROMPT]
    exact = expected(target, speculator, sampling)
    assert 0 < exact.max() < 0.75
    joint = found(decoder, prompts, first_token(target, speculator, sampling))
    return float((joint - exact).abs().max())


def once(way: str, setting: str, batched: bool) -> bool:
    """The ways that differ in what is drawn, each with one setting, alone or in a batch. All others
    give the answers of plain sampling with the same seeds: test_greedy_identity.py; drawn streams
    alone those of a batch: test_joining.py."""
    if way not in ONCE:
        return False
    if way in DRAWN:
        return batched and setting == "top_k"
    place = list(WAYS).index(way)
    turn = place // len(SAMPLINGS)
    return setting == list(SAMPLINGS)[place % len(SAMPLINGS)] and batched == bool(turn % 2)


CASES = [
    (way, setting, batched)
    for way, setting, batched in product(WAYS, SAMPLINGS, (False, True))
    # One by one, drawn children take minutes where three tokens are possible.
    if batched or way not in DRAWN or setting == "top_k"
]


@pytest.mark.parametrize(("way", "setting", "batched"), sparing(CASES, once))
def test_every_continuation_has_the_probability_of_one_token_per_forward(way, setting, batched):
    assert largest_error(way, setting, batched) < TOLERANCE


@pytest.mark.parametrize(("batched",), sparing([(False,), (True,)], lambda batched: batched))
def test_a_wrong_residual_is_noticed(monkeypatch, batched):
    """Of children that were drawn, which alone are ever rejected."""
    monkeypatch.setattr(verification, "residual", lambda remaining, _: remaining)
    assert largest_error("draft model", "temperature", batched) > 1e-3
    assert largest_error("deferred tree", "temperature", batched) < TOLERANCE
