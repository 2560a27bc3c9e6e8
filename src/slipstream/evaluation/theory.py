"""SPRINTER in formulas and in simulation: what it emits, how long its runs are, what they cost.

SPRINTER (section 3.1, appendices A.1 to A.4 and A.8), theorems 1, 2, 3 and 7, equations 5 and 6.
The draft model draws a token `x ~ q`, which is acceptable when `q(x) <= p(x)` (lambda = 1). The
verifier says yes to an acceptable token with the true-positive rate, to any other with the
false-positive rate. At its first no the target accepts the token with `min(1, p/q)` or draws from
`norm(max(0, p - q))`. The simulations run these steps and share no formula with the theorems.

It does not know of prefixes: the verifier's errors depend on nothing but acceptability, theorems 1
and 7 are about one position, and theorems 2 and 3 about a run whose first tokens are all
acceptable and the later ones all not. The verifier's own time and a cap on runs are left out.
"""

from dataclasses import dataclass

import torch

from slipstream.core.errors import InputError


@dataclass(frozen=True)
class Rates:
    """How often a verifier says yes: to acceptable tokens (eta_TP), to unacceptable ones (eta_FP).

    Raises `InputError` for a rate that is not in [0, 1): at 1 a run might never end.
    """

    true_positive: float
    false_positive: float

    def __post_init__(self) -> None:
        _check_rate("true_positive", self.true_positive)
        _check_rate("false_positive", self.false_positive)


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(...) distances d_TV of distributions p and q, both (..., V).

    >>> total_variation(torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])).item()
    0.5
    """
    return (p - q).abs().sum(-1) / 2


def sprinter_distribution(p: torch.Tensor, q: torch.Tensor, false_positive: float) -> torch.Tensor:
    """(..., V) distribution of an emitted token (theorem 1): `(1 - eta_FP) p + eta_FP q`.

    p, q: (..., V), target and draft. The true-positive rate has no part in it: the target accepts
    an acceptable token that the verifier wrongly refused. Raises `InputError` for a rate outside
    [0, 1).

    >>> p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])
    >>> sprinter_distribution(p, q, 0.5).tolist()
    [0.5, 0.5]
    """
    _check_rate("false_positive", false_positive)
    return (1 - false_positive) * p + false_positive * q


def sprinter_distance(p: torch.Tensor, q: torch.Tensor, false_positive: float) -> torch.Tensor:
    """(...) d_TV of the target's and the emitted distribution (theorem 1): `eta_FP d_TV(p, q)`.

    p, q: (..., V). Raises `InputError` for a rate outside [0, 1).

    >>> p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])
    >>> sprinter_distance(p, q, 0.5).item()
    0.25
    """
    _check_rate("false_positive", false_positive)
    return false_positive * total_variation(p, q)


def acceptance_rate(p: torch.Tensor, q: torch.Tensor, false_positive: float) -> torch.Tensor:
    """(...) shares of drafted tokens that stay (theorem 7): `1 - (1 - eta_FP) d_TV(p, q)`.

    Tokens that the target kept after a no count too. p, q: (..., V). Raises `InputError` for a
    rate outside [0, 1).

    >>> p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])
    >>> acceptance_rate(p, q, 0.5).item()
    0.75
    """
    _check_rate("false_positive", false_positive)
    return 1 - (1 - false_positive) * total_variation(p, q)


def run_length_probability(rates: Rates, acceptable: int, length: int) -> float:
    """Probability that the verifier says yes exactly `length` times before its first no.

    Theorem 2; the first `acceptable` tokens of a run are acceptable, the others are not. Raises
    `InputError` for negative `acceptable`.

    >>> [run_length_probability(Rates(0.5, 0.25), 1, length) for length in range(3)]
    [0.5, 0.375, 0.09375]
    """
    _check_acceptable(acceptable)
    if length < 0:
        return 0.0
    if length < acceptable:
        return rates.true_positive**length * (1 - rates.true_positive)
    beyond = rates.false_positive ** (length - acceptable)
    return rates.true_positive**acceptable * beyond * (1 - rates.false_positive)


def expected_run_length(rates: Rates, acceptable: int) -> float:
    """Mean number of tokens that the verifier lets pass before its first no (equation 3).

    Raises `InputError` for negative `acceptable`.

    >>> round(expected_run_length(Rates(0.9, 0.5), 5), 5)
    4.27608
    """
    _check_acceptable(acceptable)
    all_acceptable = rates.true_positive**acceptable
    early = (rates.true_positive - all_acceptable) / (1 - rates.true_positive)
    return early + all_acceptable / (1 - rates.false_positive)


def expected_stop_time(rates: Rates, acceptable: int, draft_seconds: float) -> float:
    """Mean seconds until the verifier's first no (equation 4); the refused token was drafted too.

    draft_seconds: for one token. Raises `InputError` for negative `acceptable`.

    >>> round(expected_stop_time(Rates(0.9, 0.5), 5, 0.1), 6)
    0.527608
    """
    _check_acceptable(acceptable)
    all_acceptable = rates.true_positive**acceptable
    early = (1 - all_acceptable) / (1 - rates.true_positive)
    return draft_seconds * (early + all_acceptable / (1 - rates.false_positive))


def flops_per_row(num_parameters: int) -> int:
    """FLOPs of one row through `num_parameters` weights that multiply it; attention left out.

    Embedding tables are looked up and do not count, the LM head does.

    >>> flops_per_row(1000)
    2000
    """
    return 2 * num_parameters


def speculative_flops(length: int, draft: float, target: float) -> float:
    """FLOPs of drafting `length` tokens and verifying all of them (equation 5).

    draft, target: FLOPs of one row of each model.

    >>> speculative_flops(4, 1.0, 10.0)
    44.0
    """
    return length * (draft + target)


def sprinter_flops(
    length: int, draft: float, target: float, verifier: float, target_rows: int = 1
) -> float:
    """FLOPs of a run of `length` drafted tokens with one call of the target (equation 6).

    draft, target, verifier: FLOPs of one row of each. target_rows: rows that the target's call
    computes. The paper counts one; with a KV cache the target still computes every kept token
    once, which is `target_rows=length`.

    >>> sprinter_flops(4, 1.0, 10.0, 0.5), sprinter_flops(4, 1.0, 10.0, 0.5, target_rows=4)
    (16.0, 46.0)
    """
    return length * (draft + verifier) + target_rows * target


def simulate_tokens(
    p: torch.Tensor, q: torch.Tensor, rates: Rates, num: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Emit `num` independent tokens at one position as SPRINTER does.

    p, q: (V,), target and draft. Gives (num,) token ids, and (num,) bool, whether each is the
    draft's own. Where p = q every token is acceptable, and nothing is ever drawn again:

    >>> even = torch.tensor([0.5, 0.5])
    >>> simulate_tokens(even, even, Rates(0.5, 0.5), 3, torch.Generator())[1].tolist()
    [True, True, True]
    """
    tokens = torch.multinomial(q, num, replacement=True, generator=generator)
    acceptable = (q <= p)[tokens]
    passed = _verdicts(acceptable, rates, generator)
    ratio = (p / q)[tokens].clamp(max=1)
    kept = torch.rand(num, dtype=torch.float64, generator=generator) < ratio
    from_draft = passed | kept
    num_replaced = int((~from_draft).sum())
    if num_replaced:
        residual = (p - q).clamp(min=0)
        tokens[~from_draft] = torch.multinomial(
            residual / residual.sum(), num_replaced, replacement=True, generator=generator
        )
    return tokens, from_draft


def simulate_run_lengths(
    rates: Rates, acceptable: int, num: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft `num` independent runs token by token, each until the verifier's first no.

    Gives (num,) tokens that passed and (num,) tokens drafted, the refused one included. The first
    `acceptable` tokens of a run are acceptable, the others are not. Raises `InputError` for
    negative `acceptable`.

    >>> kept, drafted = simulate_run_lengths(Rates(0.0, 0.0), 5, 3, torch.Generator())
    >>> kept.tolist(), drafted.tolist()
    ([0, 0, 0], [1, 1, 1])
    """
    _check_acceptable(acceptable)
    kept = torch.zeros(num, dtype=torch.long)
    drafted = torch.zeros(num, dtype=torch.long)
    running = torch.arange(num)
    position = 0
    while len(running):
        drafted[running] += 1
        is_acceptable = torch.full((len(running),), position < acceptable)
        running = running[_verdicts(is_acceptable, rates, generator)]
        kept[running] += 1
        position += 1
    return kept, drafted


def _verdicts(acceptable: torch.Tensor, rates: Rates, generator: torch.Generator) -> torch.Tensor:
    """(N,) bool, whether the verifier says yes, for (N,) bool, whether it should."""
    chances = torch.rand(len(acceptable), dtype=torch.float64, generator=generator)
    return torch.where(acceptable, chances < rates.true_positive, chances < rates.false_positive)


def _check_rate(name: str, rate: float) -> None:
    if not 0 <= rate < 1:
        raise InputError(f"{name}: {rate} is out of range; give a rate from 0 to just below 1")


def _check_acceptable(acceptable: int) -> None:
    if acceptable < 0:
        raise InputError(f"acceptable: {acceptable} is no number of tokens; give 0 or more")
