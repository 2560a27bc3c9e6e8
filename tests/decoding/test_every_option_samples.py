"""Exact sampling in both modes, for every option, by enumeration of what the engine may draw.

Three tokens after a first one, on a vocabulary of three: the engine must emit each of the 27
sequences with the probability that one token per forward gives it, to rounding.
"""

import pytest
import torch
from tests.core.test_exact_sampling import EnumeratedRandomness, enumerated
from tests.decoding.options import (
    OPTIONS,
    PRUNED,
    SCHEDULES,
    TREES,
    drafter_of,
    next_token_logits,
    pair_of,
)

from slipstream.core import verification
from slipstream.core.sampling import Sampling
from slipstream.decoding import decoder
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine

PROMPT, FIRST = [1, 2, 0, 1, 2], 0
VOCABULARY, COUNT = 3, 3
TOLERANCE = 1e-12
DEFERRED = ("paper", "attended_3", "rotated_values", "told_the_root", "skipped_mlp", "many")
CASES = [
    (mode, name, schedule)
    for mode, options in OPTIONS.items()
    for name in options
    for schedule in SCHEDULES[mode]
    if schedule == "fused" or name in DEFERRED
]


class AfterFirst:
    """The first token is `FIRST`; everything after it is enumerated."""

    def __init__(self, randomness: EnumeratedRandomness):
        self.accept, self.draw = randomness.accept, self._first
        self._then = randomness.draw

    def _first(self, probabilities: torch.Tensor) -> int:
        self.draw = self._then
        return FIRST


@pytest.fixture(autouse=True)
def chance_is_handed_in_as_the_seed(monkeypatch):
    monkeypatch.setattr(decoder, "SeededRandomness", lambda randomness: randomness)


def expected(target, speculator, sampling: Sampling) -> torch.Tensor:
    """(27,) probabilities of the sequences, one token per forward."""
    texts = torch.tensor([[*PROMPT, FIRST]])
    joint, tokens = torch.ones(1, dtype=torch.float64), torch.arange(VOCABULARY)
    for _ in range(COUNT):
        logits = next_token_logits(target, speculator, texts, len(PROMPT))
        joint = (joint[:, None] * sampling.probabilities(logits)).flatten()
        following = tokens.repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(VOCABULARY, dim=0), following], dim=1)
    return joint


def found(target, drafter, budget: int, sampling: Sampling) -> torch.Tensor:
    """(27,) probabilities with which the engine emits the sequences."""
    engine = Engine(target, drafter, sampling, Limits(1 + COUNT), budget)
    joint = torch.zeros([VOCABULARY] * COUNT, dtype=torch.float64)

    def outcome(randomness: EnumeratedRandomness) -> tuple:
        first, *others = engine.generate(PROMPT, seed=AfterFirst(randomness)).ids
        assert first == FIRST
        return tuple(others)

    for sequence, probability in enumerated(outcome).items():
        joint[sequence] = probability
    return joint.flatten()


def largest_error(
    mode: str, name: str, schedule: str, tree: str, sampling: Sampling | None = None
) -> float:
    target, speculator = pair_of(mode, OPTIONS[mode][name], seed=3, vocab_size=VOCABULARY)
    drafter, budget = drafter_of(speculator, schedule, tree)
    sampling = sampling or Sampling(1.0)
    exact = expected(target, speculator, sampling)
    assert exact.max() < 0.7
    error = float((found(target, drafter, budget, sampling) - exact).abs().max())
    assert drafter.pruned == (tree in PRUNED)
    return error


@pytest.mark.parametrize(("mode", "name", "schedule"), CASES)
def test_every_sequence_has_the_probability_of_one_token_per_forward(mode, name, schedule):
    assert largest_error(mode, name, schedule, "pruned") < TOLERANCE


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("tree", [tree for tree in TREES if tree != "pruned"])
def test_every_tree_leaves_the_probabilities_as_they_are(mode, tree):
    assert largest_error(mode, "paper", "fused", tree) < TOLERANCE


@pytest.mark.parametrize("mode", OPTIONS)
def test_every_sampling_option_is_followed(mode):
    sampling = Sampling(0.7, top_k=2, top_p=0.9)
    assert largest_error(mode, "pair_scores", "fused", "best_first", sampling) < TOLERANCE


@pytest.mark.parametrize("mode", OPTIONS)
def test_a_wrong_residual_is_noticed(monkeypatch, mode):
    monkeypatch.setattr(verification, "residual", lambda remaining, *_: remaining)
    assert largest_error(mode, "paper", "fused", "pruned") > 1e-3


@pytest.mark.parametrize("mode", OPTIONS)
def test_pruned_nodes_in_the_place_of_accepted_ones_are_noticed(monkeypatch, mode):
    """Below the pruning layer the rows of the forward are not those of the pruned tree."""

    def unaware(self, cache, paths, rows):
        cache.commit_each(paths)

    monkeypatch.setattr(Engine, "_commit", unaware)
    assert largest_error(mode, "many", "fused", "pruned") > 1e-3
