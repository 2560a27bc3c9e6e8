"""The one place that turns logits into probabilities, and the one source of uniform numbers.

Tokens are drawn by inverse CDF, each with the number that belongs to its place in the answer, so
that a seed gives the answer of plain sampling, however the answer is drafted.
"""

import math
from dataclasses import dataclass

import torch

from slipstream.core.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedy at temperature 0, else temperature, then top-k, then top-p."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InputError("sampling.temperature: must be 0 (greedy) or a larger finite number")
        if self.top_k is not None and self.top_k < 1:
            raise InputError("sampling.top_k: must be at least 1, or null for no limit")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError("sampling.top_p: must be in (0, 1], or null for no limit")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """(..., V) logits -> (..., V) probabilities, at least float32.

        Top-p keeps the smallest set of most probable tokens whose mass reaches `top_p`, at least
        one. Not defined at temperature 0 (ValueError).

        >>> Sampling(1.0, top_k=1).probabilities(torch.tensor([0.0, 2.0])).tolist()
        [0.0, 1.0]
        """
        if self.greedy:
            raise ValueError("greedy decoding has no distribution; take the argmax")
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        probabilities = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = probabilities.sort(descending=True, stable=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p
            outside = torch.zeros_like(beyond).scatter(-1, order, beyond)
            probabilities = probabilities.masked_fill(outside, 0.0)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """(..., V) logits -> (..., V) probabilities; greedy, all of it is the likeliest token's."""
        if not self.greedy:
            return self.probabilities(logits)
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()

    def choose(self, logits: torch.Tensor, points: torch.Tensor | None) -> torch.Tensor:
        """(..., V) logits -> (...) tokens: the likeliest, or drawn with the (...) uniform numbers
        `points` (None for greedy decoding)."""
        return logits.argmax(-1) if self.greedy else draw(self.probabilities(logits), points)


def draw(probabilities: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """One token of each (..., V) distribution, by inverse CDF in float64, from (...) `points` in
    [0, 1).

    >>> draw(torch.tensor([[0.5, 0.0, 0.5]]), torch.tensor([0.5])).tolist()
    [2]
    """
    cumulative = probabilities.double().cumsum(-1)
    total = cumulative[..., -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    points = torch.minimum(points[..., None].double() * total, below)
    return torch.searchsorted(cumulative, points, right=True)[..., 0]


class Chance:
    """The uniform numbers of one request, by its seed alone.

    decide: (count,) float64, one for each token of the answer: with it the token is drawn from the
    target's distribution, whatever is drafted. keep: (count,), whether a drawn draft token in this
    place stays. All other numbers, for what is drawn in order to draft, come from a third stream;
    trees must depend on nothing else.
    """

    def __init__(self, seed: int, count: int):
        streams = torch.randint(2**31, (3,), generator=torch.Generator().manual_seed(seed))
        decide, keep, self._drafting = (
            torch.Generator().manual_seed(stream) for stream in streams.tolist()
        )
        self.decide = torch.rand(count, dtype=torch.float64, generator=decide)
        self.keep = torch.rand(count, dtype=torch.float64, generator=keep)

    def number(self) -> torch.Tensor:
        """A scalar, of the third stream."""
        return torch.rand((), dtype=torch.float64, generator=self._drafting)

    def draw(self, probabilities: torch.Tensor) -> int:
        """An index drawn from (V,) `probabilities`; waits for their device."""
        return int(draw(probabilities, self.number().to(probabilities.device)))

    def accept(self, probability: float) -> bool:
        """True with `probability`."""
        return float(self.number()) < probability
