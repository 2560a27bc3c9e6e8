"""SPRINTER's theorems 1, 2 and 7 and its FLOP counts in closed form, and its rule as a simulation.

The references that `studies/sprinter_theory.py` and `studies/approximation.py` are held against:
what is simulated runs the steps of the rule and shares no formula with the theorems.
"""

import torch
from studies.sprinter_theory import Rates, total_variation, verdicts

from slipstream.core.settings import Amount, Below1, checked


@checked
def sprinter_distribution(p: torch.Tensor, q: torch.Tensor, false_positive: Below1) -> torch.Tensor:
    """(..., V) distribution of an emitted token (theorem 1): `(1 - eta_FP) p + eta_FP q`.

    p, q: (..., V), target and draft. The true-positive rate has no part in it: the target accepts
    an acceptable token that the verifier wrongly refused.

    >>> p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])
    >>> sprinter_distribution(p, q, 0.5).tolist()
    [0.5, 0.5]
    """
    return (1 - false_positive) * p + false_positive * q


@checked
def sprinter_distance(p: torch.Tensor, q: torch.Tensor, false_positive: Below1) -> torch.Tensor:
    """(...) d_TV of the target's and the emitted distribution (theorem 1): `eta_FP d_TV(p, q)`.

    p, q: (..., V).

    >>> p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])
    >>> sprinter_distance(p, q, 0.5).item()
    0.25
    """
    return false_positive * total_variation(p, q)


@checked
def acceptance_rate(p: torch.Tensor, q: torch.Tensor, false_positive: Below1) -> torch.Tensor:
    """(...) shares of drafted tokens that stay (theorem 7): `1 - (1 - eta_FP) d_TV(p, q)`.

    Tokens that the target kept after a no count too. p, q: (..., V).

    >>> p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])
    >>> acceptance_rate(p, q, 0.5).item()
    0.75
    """
    return 1 - (1 - false_positive) * total_variation(p, q)


@checked
def run_length_probability(rates: Rates, acceptable: Amount, length: int) -> float:
    """Probability that the verifier says yes exactly `length` times before its first no.

    Theorem 2; the first `acceptable` tokens of a run are acceptable, the others are not.

    >>> [run_length_probability(Rates(0.5, 0.25), 1, length) for length in range(3)]
    [0.5, 0.375, 0.09375]
    """
    if length < 0:
        return 0.0
    if length < acceptable:
        return rates.true_positive**length * (1 - rates.true_positive)
    beyond = rates.false_positive ** (length - acceptable)
    return rates.true_positive**acceptable * beyond * (1 - rates.false_positive)


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
    passed = verdicts(acceptable, rates, generator)
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
