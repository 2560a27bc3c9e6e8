"""How far SPRINTER's tokens are from the target's, and what its theorems say of that.

At every position that was drafted, the distribution of what was emitted there is computed exactly
from both models' distributions and from what the verifier says of every token of the vocabulary.
Nothing here is drawn at random.
"""

from dataclasses import dataclass

import torch

from slipstream.decoding.sprinter import SprinterDecoder
from slipstream.evaluation.theory import Rates, expected_run_length, total_variation
from slipstream.speculators.draft_features import shape_of
from slipstream.targets.reading import Reader
from slipstream.targets.target import Target

LONGEST_RUN = 200
"""Runs of acceptable tokens are summed up to here."""


@dataclass(frozen=True)
class Approximation:
    """Sums over drafted positions; the rates are made of them.

    distance: d_TV(p, p_S) of what was emitted; pair_distance: d_TV(p, q); acceptable: probability
    that a drafted token has q <= p; kept_acceptable, kept_others: probability that it is kept by
    the verifier, and is or is not acceptable.
    """

    positions: int = 0
    distance: float = 0.0
    pair_distance: float = 0.0
    acceptable: float = 0.0
    kept_acceptable: float = 0.0
    kept_others: float = 0.0

    def __add__(self, other: "Approximation") -> "Approximation":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Approximation(*(own + added for own, added in pairs))

    @property
    def rates(self) -> Rates:
        """eta_TP and eta_FP, for lambda = 1, just below 1 where they are 1."""
        others, most = self.positions - self.acceptable, 1 - 1e-9
        return Rates(
            min(most, self.kept_acceptable / max(self.acceptable, 1e-9)),
            min(most, self.kept_others / max(others, 1e-9)),
        )

    @property
    def mean_distance(self) -> float:
        return self.distance / max(1, self.positions)

    @property
    def predicted_distance(self) -> float:
        """Theorem 1: eta_FP d_TV(p, q)."""
        return self.rates.false_positive * self.pair_distance / max(1, self.positions)

    @property
    def predicted_run(self) -> float:
        """Theorem 2: tokens kept before a call of the target, the mean over how many acceptable
        ones come first, of which each is acceptable with the same probability."""
        share = self.acceptable / max(1, self.positions)
        return sum(
            share**count * (1 - share) * expected_run_length(self.rates, count)
            for count in range(LONGEST_RUN)
        )


def emitted_distribution(p: torch.Tensor, q: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """(..., V) what SPRINTER emits, from target p and draft q, both (..., V).

    kept: (..., V), what the verifier says of each token were it drawn. A token in doubt stays with
    min(1, p/q), else one of norm(max(0, p - q)) takes its place. If the verifier keeps nothing:

    >>> p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])
    >>> emitted_distribution(p, q, torch.tensor([False, False])).tolist()
    [0.75, 0.25]
    >>> emitted_distribution(p, q, torch.tensor([False, True])).tolist()
    [0.25, 0.75]
    """
    stays = torch.where(kept, q, torch.minimum(p, q))
    missing = (p - q).clamp(min=0)
    total = missing.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return stays + (1 - stays.sum(-1, keepdim=True)) * missing / total


@torch.inference_mode()
def approximation(
    decoder: SprinterDecoder, prompts: list[list[int]], answers: list[list[int]]
) -> Approximation:
    """Of answers that `decoder` gave to `prompts`; the first token of each is the target's own."""
    found = Approximation()
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(answer) < 2:
            continue
        text, positions = prompt + answer[:-1], slice(len(prompt), None)
        hidden = _states(decoder.draft, text)[positions]
        logits = decoder.draft.logits(hidden)
        q = decoder.sampling.probabilities(logits).double()
        judging = decoder.target.logits(_states(decoder.target, text)[positions])
        p = decoder.sampling.probabilities(judging).double().to(q.device)
        kept = torch.stack([_kept(decoder, *each) for each in zip(hidden, logits, strict=True)])
        good = q <= p
        emitted = emitted_distribution(p, q, kept)
        found += Approximation(
            len(q),
            total_variation(p, emitted).sum().item(),
            total_variation(p, q).sum().item(),
            (q * good).sum().item(),
            (q * (kept & good)).sum().item(),
            (q * (kept & ~good)).sum().item(),
        )
    return found


def _kept(decoder: SprinterDecoder, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """(V,) whether the verifier would keep each token, drawn from (V,) logits at a (D,) state."""
    count = len(logits)
    tokens = torch.arange(count, device=logits.device)
    each = decoder.verifier.features(
        decoder.draft.norm(hidden).expand(count, -1),
        tokens,
        shape_of(logits).expand(count, -1),
        logits.float().log_softmax(-1),
    )
    return decoder.verifier(each)[:, decoder.output].sigmoid() >= decoder.threshold


def _states(model: Target, text: list[int]) -> torch.Tensor:
    """(T, D) states before the final norm."""
    reader = Reader(model)
    reader.begin(len(text), 1)
    return reader.states([text])[0]
