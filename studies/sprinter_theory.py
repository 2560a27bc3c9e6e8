"""SPRINTER's runs in formulas and in simulation: how long they are and what they cost (SPRINTER,
section 3.1, appendices A.1 to A.4, theorems 2 and 3, Figures 5 and 6).

A drafted token is acceptable when `q(x) <= p(x)` (lambda = 1). The verifier says yes to an
acceptable token with the true-positive rate, to any other with the false-positive rate; its first
no ends the run. The simulation runs these steps and shares no formula with the theorems.

It does not know of prefixes: the first `acceptable` tokens of a run are acceptable, the later ones
are not. The verifier's own time and a cap on runs are left out, and so are rates of 1, with which a
run might never end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated

import torch

from slipstream.core.settings import Amount, Below1, Count, Len, Positive, Settings, checked
from studies import Plot, Prompt, Result, Target

TRUE_POSITIVES = [*(tenths / 10 for tenths in range(10)), 0.95, 0.99]
LENGTH, TIME, SIMULATED = "E[N]", "E[T_stop], s", ", simulated"


def sprinter_theory(
    target: Target,
    prompts: list[Prompt],
    acceptable: Count,
    false_positives: Annotated[Sequence[Below1], Len(1)],
    draft_seconds: Positive,
    samples: Count,
) -> Result:
    """Theorems 2 and 3, and a simulation of `samples` runs for each pair of rates. draft_seconds:
    for one token. It needs no model."""
    generator, rows = torch.Generator().manual_seed(0), []
    for false, true in product(false_positives, TRUE_POSITIVES):
        rates = Rates(true, false)
        kept, drafted = simulate_run_lengths(rates, acceptable, samples, generator)
        rows.append(
            {
                "eta_TP": true,
                "eta_FP": false,
                LENGTH: expected_run_length(rates, acceptable),
                LENGTH + SIMULATED: kept.double().mean().item(),
                TIME: expected_stop_time(rates, acceptable, draft_seconds),
                TIME + SIMULATED: drafted.double().mean().item() * draft_seconds,
            }
        )
    title = "SPRINTER's runs, by theorem and by simulation (SPRINTER, Figures 5 and 6)"
    panels = (LENGTH, LENGTH + SIMULATED), (TIME, TIME + SIMULATED)
    return Result(title, rows, (Plot("eta_TP", panels, hue="eta_FP"),))


@dataclass(frozen=True)
class Rates(Settings):
    """How often a verifier says yes: to acceptable tokens (eta_TP), to others (eta_FP)."""

    true_positive: Below1
    false_positive: Below1


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(...) distances d_TV of distributions p and q, both (..., V).

    >>> total_variation(torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])).item()
    0.5
    """
    return (p - q).abs().sum(-1) / 2


@checked
def expected_run_length(rates: Rates, acceptable: Amount) -> float:
    """Mean number of tokens that the verifier lets pass before its first no (equation 3).

    >>> round(expected_run_length(Rates(0.9, 0.5), 5), 5)
    4.27608
    """
    return _run_length(rates, rates.true_positive**acceptable)


def mean_run_length(rates: Rates, share: float) -> float:
    """E[N] of theorem 2 where r has P(r = k) = share^k (1 - share).

    In closed form, by E[eta_TP^r] = (1 - share) / (1 - share eta_TP). With eta_TP 0.5, eta_FP 0 and
    share 0.5, E[0.5^r] = 2/3:

    >>> round(mean_run_length(Rates(0.5, 0.0), 0.5), 5)  # (0.5 - 2/3) / 0.5 + 2/3
    0.33333
    """
    return _run_length(rates, (1 - share) / (1 - share * rates.true_positive))


def _run_length(rates: Rates, power: float) -> float:
    """Equation 3, with `power` for eta_TP^r."""
    early = (rates.true_positive - power) / (1 - rates.true_positive)
    return early + power / (1 - rates.false_positive)


def expected_stop_time(rates: Rates, acceptable: int, draft_seconds: float) -> float:
    """Mean seconds until the verifier's first no (equation 4); the refused token was drafted too.

    >>> round(expected_stop_time(Rates(0.9, 0.5), 5, 0.1), 6)
    0.527608
    """
    return draft_seconds * (expected_run_length(rates, acceptable) + 1)


@checked
def simulate_run_lengths(
    rates: Rates, acceptable: Amount, num: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft `num` independent runs token by token, each until the verifier's first no.

    Gives (num,) tokens that passed and (num,) tokens drafted, the refused one included.

    >>> kept, drafted = simulate_run_lengths(Rates(0.0, 0.0), 5, 3, torch.Generator())
    >>> kept.tolist(), drafted.tolist()
    ([0, 0, 0], [1, 1, 1])
    """
    kept, drafted = torch.zeros(2, num, dtype=torch.long)
    running, position = torch.arange(num), 0
    while len(running):
        drafted[running] += 1
        is_acceptable = torch.full((len(running),), position < acceptable)
        running = running[verdicts(is_acceptable, rates, generator)]
        kept[running] += 1
        position += 1
    return kept, drafted


def verdicts(acceptable: torch.Tensor, rates: Rates, generator: torch.Generator) -> torch.Tensor:
    """(N,) bool, whether the verifier says yes, for (N,) bool, whether it should."""
    chances = torch.rand(len(acceptable), dtype=torch.float64, generator=generator)
    return torch.where(acceptable, chances < rates.true_positive, chances < rates.false_positive)
