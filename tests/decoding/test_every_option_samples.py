"""Exact sampling in both modes, for every option, by enumeration of what the engine may draw.

Three tokens after a first one, on a vocabulary of three: the engine must emit each of the 27
sequences with the probability that one token per forward gives it, to rounding.
"""

import pytest
import torch
from tests.decoding.options import (
    OPTIONS,
    PRUNED,
    SCHEDULES,
    TREES,
    drafter_of,
    next_token_logits,
    one_number_for_two_depths,
    pair_of,
)
from tests.enumeration import EnumeratedChance, enumerated_together
from tests.exhaustive import sparing

from slipstream.core.cache import StepCache
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.engine import Engine

PROMPT = [1, 2, 0, 1, 2]
VOCABULARY, COUNT = 3, 3
TOGETHER = 32
TOLERANCE = 1e-12
pytestmark = pytest.mark.usefixtures("chance")
DEFERRED = ("paper", "attended_3", "rotated_values", "told_the_root", "skipped_mlp", "many")
CASES = [
    (mode, name, schedule)
    for mode, options in OPTIONS.items()
    for name in options
    for schedule in SCHEDULES[mode]
    if schedule == "fused" or name in DEFERRED
]
ONE_MODE = sparing(zip(OPTIONS), lambda mode: mode == "lossless")
"""For what does not look at the mode."""


def first_token(target, speculator, sampling: Sampling) -> tuple[int, float]:
    """The first one that is possible, and a number that chooses it."""
    logits = next_token_logits(target, speculator, torch.tensor([PROMPT]), len(PROMPT))
    (probabilities,) = sampling.probabilities(logits)
    token = int(probabilities.nonzero()[0])
    return token, float(probabilities.cumsum(-1)[token] - probabilities[token] / 2)


def expected(target, speculator, sampling: Sampling) -> torch.Tensor:
    """(27,) probabilities of the sequences, one token per forward."""
    texts = torch.tensor([[*PROMPT, first_token(target, speculator, sampling)[0]]])
    joint, tokens = torch.ones(1, dtype=torch.float64), torch.arange(VOCABULARY)
    for _ in range(COUNT):
        logits = next_token_logits(target, speculator, texts, len(PROMPT))
        joint = (joint[:, None] * sampling.probabilities(logits)).flatten()
        following = tokens.repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(VOCABULARY, dim=0), following], dim=1)
    return joint


def found(decoder: Decoder, prompts: list[list[int]], first: tuple[int, float]) -> torch.Tensor:
    """(27,) probabilities with which the decoder emits the sequences after `PROMPT`, which is one
    of `prompts`: alone, or in batches of them with many of it."""
    joint = torch.zeros([VOCABULARY] * COUNT, dtype=torch.float64)
    place, (token, number) = prompts.index(PROMPT), first
    before, after = prompts[:place], prompts[place + 1 :]

    def outcomes(chances: list[EnumeratedChance]) -> list[tuple]:
        batch = [*before, *[PROMPT] * len(chances), *after]
        seeds = [*range(place), *chances, *range(len(after))]
        answers = decoder.generate_batch(batch, seeds)[place : place + len(chances)]
        assert all(answer.ids[0] == token for answer in answers)
        return [tuple(answer.ids[1:]) for answer in answers]

    most = TOGETHER if len(prompts) > 1 else 1
    distribution = enumerated_together(outcomes, {("decide", 0): number}, most)
    for sequence, probability in distribution.items():
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
    engine = Engine(target, drafter, sampling, Limits(1 + COUNT), budget)
    first = first_token(target, speculator, sampling)
    error = float((found(engine, [PROMPT], first) - exact).abs().max())
    assert drafter.pruned == (tree in PRUNED)
    return error


def once(mode: str, name: str, schedule: str) -> bool:
    """Both schedules, and both modes; the logits of each option are proven in
    test_every_option.py."""
    if mode == "shared":
        return name in ("paper", "many")
    other = ("paper", "fused"), ("told_the_root", "deferred")
    return name in ("many", "pair_scores") or (name, schedule) in other


@pytest.mark.parametrize(("mode", "name", "schedule"), sparing(CASES, once))
def test_every_sequence_has_the_probability_of_one_token_per_forward(mode, name, schedule):
    assert largest_error(mode, name, schedule, "pruned") < TOLERANCE


@pytest.mark.parametrize(
    ("mode", "tree"),
    sparing(
        [(mode, tree) for mode in OPTIONS for tree in TREES if tree != "pruned"],
        lambda mode, tree: mode == "lossless" and tree in ("threshold", "cap"),
    ),
)
def test_every_tree_leaves_the_probabilities_as_they_are(mode, tree):
    assert largest_error(mode, "paper", "fused", tree) < TOLERANCE


@pytest.mark.parametrize(("mode",), ONE_MODE)
def test_every_sampling_option_is_followed(mode):
    sampling = Sampling(0.7, top_k=2, top_p=0.9)
    assert largest_error(mode, "pair_scores", "fused", "best_first", sampling) < TOLERANCE


@pytest.mark.parametrize(("mode",), ONE_MODE)
def test_one_number_for_two_depths_is_noticed(monkeypatch, mode):
    one_number_for_two_depths(monkeypatch)
    assert largest_error(mode, "paper", "fused", "pruned") > 1e-3


@pytest.mark.parametrize(("mode",), ONE_MODE)
def test_pruned_nodes_in_the_place_of_accepted_ones_are_noticed(monkeypatch, mode):
    """Below the pruning layer the rows of the forward are not those of the pruned tree."""
    commit = StepCache.commit
    monkeypatch.setattr(
        StepCache, "commit", lambda cache, rows, counts, below=None: commit(cache, rows, counts)
    )
    assert largest_error(mode, "many", "fused", "pruned") > 1e-3
