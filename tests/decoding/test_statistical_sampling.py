"""Every drafter samples from the target: chi-square tests at temperature 1, with fixed seeds.

Tokens two and three are drafted (token one comes from the prefill), so their joint distribution is
tested against the exact one, which plain forwards of all prefixes give. A test that could not
notice a wrong rule would be worthless: one is put in its place, and the test must fail.
"""

import pytest
import torch
from tests.decoding.options import one_number_for_two_depths
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core import verification
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.base import Drafter
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.streaming import Streaming
from slipstream.targets.target import Target

SIZE = 6
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
NUM_RUNS = 500
RAREST = 8.0
pytestmark = pytest.mark.exhaustive  # by enumeration in test_sampling_table.py


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(seed=10, num_hidden_layers=2, vocab_size=SIZE)


def draft_model() -> DraftModel:
    return DraftModel(tiny_target(seed=109, num_hidden_layers=1, vocab_size=SIZE), num_tokens=2)


def streaming(target: Target, schedule: str, **pruning) -> Streaming:
    speculator = tiny_speculator(target, num_msa_layers=1, num_streams=2)
    return Streaming(speculator, schedule, top_k=3, **pruning)


DRAFTERS = {
    "prompt_lookup": lambda _: PromptLookup(max_ngram=2, num_tokens=3),
    "draft_model": lambda _: draft_model(),
    "streaming_fused": lambda target: streaming(target, "fused"),
    "streaming_deferred": lambda target: streaming(target, "deferred"),
    "streaming_fused_pruned": lambda target: streaming(
        target, "fused", prune_threshold=0.1, prune_cap=3
    ),
    "streaming_deferred_pruned": lambda target: streaming(
        target, "deferred", prune_threshold=0.1, prune_cap=3
    ),
}


def exact_pairs(target: Target, sampling: Sampling) -> torch.Tensor:
    """(SIZE * SIZE,): probability of the second and third token, summed over the first."""

    def after(prefixes: torch.Tensor) -> torch.Tensor:
        prompts = torch.tensor(PROMPT).expand(len(prefixes), -1)
        ids = torch.cat([prompts, prefixes], dim=1)
        return sampling.probabilities(target.model(ids).logits[:, -1])

    tokens = torch.arange(SIZE)
    one = after(torch.empty(1, 0, dtype=torch.long))[0]
    two = after(tokens[:, None])
    three = after(torch.cartesian_prod(tokens, tokens)).view(SIZE, SIZE, SIZE)
    return (one[:, None, None] * two[:, :, None] * three).sum(0).flatten()


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """p-value of the counts; the rarest cells are pooled until each expects at least `RAREST`."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0
    order = expected.argsort()
    groups = torch.zeros(len(order), dtype=torch.long)
    group, mass = 0, 0.0
    for cell in order.tolist():
        if mass >= RAREST:
            group, mass = group + 1, 0.0
        groups[cell] = group
        mass += float(expected[cell])
    pooled = torch.zeros(group + 1, dtype=torch.float64)
    wanted = pooled.index_add(0, groups, expected)
    found = pooled.index_add(0, groups, counts.double())
    assert group > 5
    statistic = ((found - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor(group / 2).double(), statistic / 2))


def sampled_pairs(engine: Engine | PlainDecoder, num_runs: int = NUM_RUNS) -> torch.Tensor:
    """(SIZE * SIZE,) counts of the second and third token over seeds 0, 1, ..."""
    counts = torch.zeros(SIZE * SIZE)
    for seed in range(num_runs):
        _, second, third = engine.generate(PROMPT, seed=seed).ids
        counts[second * SIZE + third] += 1
    return counts


def engine_of(target: Target, drafter: Drafter, sampling: Sampling, num_tokens: int = 3) -> Engine:
    return Engine(target, drafter, sampling, Limits(num_tokens), budget=6)


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_samples_have_the_distribution_of_the_target(target, name):
    engine = engine_of(target, DRAFTERS[name](target), Sampling(1.0))
    exact = exact_pairs(target, Sampling(1.0))
    assert chi_square(sampled_pairs(engine), exact) > 1e-3


def test_plain_decoding_passes_the_same_test(target):
    decoder = PlainDecoder(target, Sampling(1.0), Limits(3))
    exact = exact_pairs(target, Sampling(1.0))
    assert chi_square(sampled_pairs(decoder), exact) > 1e-3


@pytest.mark.parametrize("name", ["draft_model", "streaming_deferred"])
def test_samples_follow_the_sampling_options(target, name):
    sampling = Sampling(0.8, top_k=5, top_p=0.9)
    engine = engine_of(target, DRAFTERS[name](target), sampling)
    counts = sampled_pairs(engine)
    assert chi_square(counts, exact_pairs(target, sampling)) > 1e-3
    everything = exact_pairs(target, Sampling(1.0))
    assert chi_square(counts, everything) < 1e-6


def test_the_test_itself_can_tell_distributions_apart(target):
    exact = exact_pairs(target, Sampling(1.0))
    other = exact_pairs(target, Sampling(1.5))
    generator = torch.Generator().manual_seed(0)
    for truth in (exact, other):
        drawn = torch.multinomial(truth, NUM_RUNS, replacement=True, generator=generator)
        counts = torch.bincount(drawn, minlength=SIZE * SIZE)
        assert (chi_square(counts, exact) > 1e-3) == (truth is exact)


def wrong_residual(monkeypatch) -> None:
    monkeypatch.setattr(verification, "residual", lambda remaining, _: remaining)


@pytest.mark.parametrize(
    ("name", "broken"),
    [("draft_model", wrong_residual), ("streaming_deferred", one_number_for_two_depths)],
)
def test_a_wrong_rule_fails(target, monkeypatch, name, broken):
    broken(monkeypatch)
    engine = engine_of(target, DRAFTERS[name](target), Sampling(1.0))
    exact = exact_pairs(target, Sampling(1.0))
    assert chi_square(sampled_pairs(engine, 2 * NUM_RUNS), exact) < 1e-6


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_a_seed_decides_every_token(target, name):
    drafter = DRAFTERS[name](target)
    engine = engine_of(target, drafter, Sampling(1.0), num_tokens=12)
    answers = [engine.generate(PROMPT, seed=seed).ids for seed in (7, 8, 7)]
    assert answers[0] == answers[2] != answers[1]
    again = engine_of(target, DRAFTERS[name](target), Sampling(1.0), num_tokens=12)
    assert again.generate(PROMPT, seed=7).ids == answers[0]


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_some_drafted_tokens_are_kept_and_some_are_not(target, name):
    kept = []
    engine = engine_of(target, DRAFTERS[name](target), Sampling(1.0), num_tokens=40)
    statistics = engine.generate(
        PROMPT, callback=lambda _, drafted, __: kept.append(drafted)
    ).statistics
    assert 1.05 < statistics.tau < 3.0
    assert 2 < sum(kept) < 38
