"""SPRINTER's theorems against simulations that share no formula with them, and worked numbers."""

import json
import math

import pytest
import torch
from studies import sprinter_theory
from studies.sprinter_theory import (
    Rates,
    expected_run_length,
    expected_stop_time,
    simulate_run_lengths,
    total_variation,
)
from tests.exhaustive import sparing
from tests.studies.theorems import (
    acceptance_rate,
    run_length_probability,
    simulate_tokens,
    speculative_flops,
    sprinter_distance,
    sprinter_distribution,
    sprinter_flops,
)

from slipstream.core.errors import InputError
from slipstream.core.settings import check
from slipstream.results.record import environment
from slipstream.results.writer import write

SETTINGS = sparing([(seed,) for seed in range(20)], lambda seed: seed < 2)
SIGMAS = 5
"""Standard errors that a right formula may be off by: one in 1.7 million draws would exceed it."""


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()


def random_pair(generator: torch.Generator, num_tokens: int = 8) -> tuple[torch.Tensor, ...]:
    logits = 2 * torch.randn(2, num_tokens, generator=generator, dtype=torch.float64)
    return logits.softmax(-1).unbind()


@pytest.mark.parametrize(("seed",), SETTINGS)
def test_theorems_1_and_7_against_simulation(seed):
    """Three criteria. Every token's frequency lies within 5 standard errors of theorem 1. The
    distance to p and the acceptance rate lie within 1 %: the distance of frequencies is measured
    on the set {p > q}, as its usual sum of absolute values would add up the noise of all tokens;
    with 4 million tokens one standard error is below 0.2 % for every setting here.
    """
    generator = generator_of(seed)
    p, q = random_pair(generator)
    rates = Rates(uniform(0, 1, generator), uniform(0.3, 0.95, generator))
    num = 4_000_000
    tokens, from_draft = simulate_tokens(p, q, rates, num, generator)
    frequencies = torch.bincount(tokens, minlength=len(p)).double() / num

    predicted = sprinter_distribution(p, q, rates.false_positive)
    errors = (predicted * (1 - predicted) / num).sqrt()
    assert ((frequencies - predicted).abs() <= SIGMAS * errors).all()

    distance = sprinter_distance(p, q, rates.false_positive).item()
    assert (p - frequencies)[p > q].sum().item() == pytest.approx(distance, rel=0.01)
    assert total_variation(p, predicted).item() == pytest.approx(distance, rel=1e-12)

    acceptance = acceptance_rate(p, q, rates.false_positive).item()
    assert from_draft.double().mean().item() == pytest.approx(acceptance, rel=0.01)


@pytest.mark.parametrize(("seed",), SETTINGS)
def test_theorems_2_and_3_against_simulation(seed):
    """Means lie within 1 %; with a million runs one standard error is below 0.2 % for every
    setting here. The share of runs of each length lies within 5 standard errors.
    """
    generator = generator_of(100 + seed)
    rates = Rates(uniform(0.3, 0.98, generator), uniform(0.05, 0.85, generator))
    acceptable = int(torch.randint(1, 11, (), generator=generator))
    draft_seconds = uniform(0.01, 0.2, generator)
    num = 1_000_000
    kept, drafted = simulate_run_lengths(rates, acceptable, num, generator)

    mean = kept.double().mean().item()
    assert mean == pytest.approx(expected_run_length(rates, acceptable), rel=0.01)
    time = drafted.double().mean().item() * draft_seconds
    assert time == pytest.approx(expected_stop_time(rates, acceptable, draft_seconds), rel=0.01)

    shares = (torch.bincount(kept, minlength=20)[:20] / num).tolist()
    for length, share in enumerate(shares):
        predicted = run_length_probability(rates, acceptable, length)
        if predicted * num >= 100:
            error = math.sqrt(predicted * (1 - predicted) / num)
            assert abs(share - predicted) <= SIGMAS * error


def test_true_positives_do_not_change_what_is_emitted():
    """Same frequencies with a verifier that refuses all good tokens and one that refuses few, and
    the first calls the target far more often."""
    p, q = random_pair(generator_of(7))
    num = 500_000
    frequencies = []
    for true_positive in (0.0, 0.99):
        tokens, _ = simulate_tokens(p, q, Rates(true_positive, 0.4), num, generator_of(8))
        frequencies.append(torch.bincount(tokens, minlength=len(p)).double() / num)
    errors = (2 * sprinter_distribution(p, q, 0.4) / num).sqrt()
    assert ((frequencies[0] - frequencies[1]).abs() <= SIGMAS * errors).all()
    none, many = (
        simulate_run_lengths(Rates(true, 0.4), 5, 1000, generator_of(9))[0].sum()
        for true in (0.0, 0.99)
    )
    assert none == 0
    assert many > 4000


def test_a_verifier_without_false_positives_leaves_the_target_as_it_is():
    p, q = random_pair(generator_of(3))
    assert torch.equal(sprinter_distribution(p, q, 0.0), p)
    assert sprinter_distance(p, q, 0.0) == 0
    assert acceptance_rate(p, q, 0.0).item() == pytest.approx(1 - total_variation(p, q).item())
    tokens, _ = simulate_tokens(p, q, Rates(0.5, 0.0), 500_000, generator_of(4))
    frequencies = torch.bincount(tokens, minlength=len(p)).double() / 500_000
    assert ((frequencies - p).abs() <= SIGMAS * (p * (1 - p) / 500_000).sqrt()).all()


def test_distributions_that_share_no_token():
    p, q = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    assert total_variation(p, q) == 1
    assert acceptance_rate(p, q, 0.25) == 0.25
    tokens, from_draft = simulate_tokens(p, q, Rates(0.5, 0.0), 100, generator_of(0))
    assert tokens.tolist() == [1] * 100
    assert not from_draft.any()


def test_distributions_may_come_in_batches():
    pairs = [random_pair(generator_of(seed)) for seed in range(3)]
    p, q = (torch.stack(part) for part in zip(*pairs, strict=True))
    assert sprinter_distribution(p, q, 0.3).sum(-1).tolist() == pytest.approx([1.0] * 3)
    for function in (sprinter_distance, acceptance_rate):
        singly = [function(*pair, 0.3).item() for pair in pairs]
        assert function(p, q, 0.3).tolist() == pytest.approx(singly)


@pytest.mark.parametrize("acceptable", [0, 1, 5])
@pytest.mark.parametrize("rates", [Rates(0.9, 0.5), Rates(0.0, 0.5), Rates(0.9, 0.0)])
def test_probabilities_of_theorem_2_sum_to_1_and_have_its_mean(rates, acceptable):
    chances = [run_length_probability(rates, acceptable, length) for length in range(200)]
    assert sum(chances) == pytest.approx(1.0, rel=1e-12)
    mean = sum(length * chance for length, chance in enumerate(chances))
    assert expected_run_length(rates, acceptable) == pytest.approx(mean, rel=1e-12, abs=1e-12)
    time = sum(0.1 * (length + 1) * chance for length, chance in enumerate(chances))
    assert expected_stop_time(rates, acceptable, 0.1) == pytest.approx(time, rel=1e-12)


def test_worked_numbers():
    assert expected_run_length(Rates(0.9, 0.5), 5) == pytest.approx(4.27608, abs=1e-9)
    assert expected_stop_time(Rates(0.9, 0.5), 5, 0.1) == pytest.approx(0.527608, abs=1e-9)
    assert run_length_probability(Rates(0.9, 0.5), 5, -1) == 0.0


def test_beyond_the_acceptable_tokens_a_near_perfect_verifier_keeps_at_most_one():
    """The gaps of Figures 5 and 6: at eta_FP = 0.5 one token and one drafting time."""
    assert expected_run_length(Rates(1 - 1e-9, 0.5), 5) == pytest.approx(6, rel=1e-6)
    assert expected_run_length(Rates(1 - 1e-9, 0.0), 5) == pytest.approx(5, rel=1e-6)
    assert expected_stop_time(Rates(1 - 1e-9, 0.5), 5, 0.1) == pytest.approx(0.7, rel=1e-6)


def test_flops_saved_by_one_target_row_a_run():
    draft, target, verifier = 2.5e8, 2.6e9, 1538.0
    saved = speculative_flops(20, draft, target) - sprinter_flops(20, draft, target, verifier)
    assert saved == pytest.approx(19 * target - 20 * verifier)
    every_row = sprinter_flops(20, draft, target, verifier, target_rows=20)
    assert every_row - speculative_flops(20, draft, target) == pytest.approx(20 * verifier)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, math.nan])
def test_rates_out_of_range_are_refused(rate):
    even = torch.tensor([0.5, 0.5])
    with pytest.raises(InputError, match=r"true_positive: .* at least 0 and below 1"):
        Rates(rate, 0.5)
    with pytest.raises(InputError, match=r"false_positive: .* at least 0 and below 1"):
        Rates(0.5, rate)
    for function in (sprinter_distribution, sprinter_distance, acceptance_rate):
        with pytest.raises(InputError, match="false_positive"):
            function(even, even, rate)


def test_negative_numbers_of_acceptable_tokens_are_refused():
    rates = Rates(0.9, 0.5)
    for call in (
        lambda: run_length_probability(rates, -1, 0),
        lambda: expected_run_length(rates, -1),
        lambda: expected_stop_time(rates, -1, 0.1),
        lambda: simulate_run_lengths(rates, -1, 1, generator_of(0)),
    ):
        with pytest.raises(InputError, match=r"acceptable: .*-1 was given"):
            call()


def test_the_study_sets_simulation_beside_theorem(tmp_path, target):
    found = sprinter_theory.sprinter_theory(target, [], 5, [0.1, 0.5], 0.1, samples=100_000)
    assert len(found.rows) == 24
    row = next(row for row in found.rows if (row["eta_TP"], row["eta_FP"]) == (0.9, 0.5))
    assert row["E[N]"] == pytest.approx(4.27608)
    assert row["E[T_stop], s"] == pytest.approx(0.527608)
    for row in found.rows:
        for column in ("E[N]", "E[T_stop], s"):
            assert row[f"{column}, simulated"] == pytest.approx(row[column], rel=0.05)
        assert row["E[N], simulated"] != row["E[N]"] or row["eta_TP"] == 0
    write(tmp_path, found, {}, environment(target))
    assert json.loads((tmp_path / "results.json").read_text())["results"] == found.rows
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ((0, [0.5], 0.1, 10), "study.acceptable"),
        ((5, [], 0.1, 10), "study.false_positives"),
        ((5, [1.0], 0.1, 10), "study.false_positives"),
        ((5, [0.5], 0.0, 10), "study.draft_seconds"),
        ((5, [0.5], 0.1, 0), "study.samples"),
    ],
)
def test_numbers_that_the_study_cannot_use_are_named(options, field):
    names = "acceptable", "false_positives", "draft_seconds", "samples"
    given, later = dict(zip(names, options, strict=True)), ("target", "prompts")
    with pytest.raises(InputError, match=field):
        check(sprinter_theory.sprinter_theory, given, "study", later)
