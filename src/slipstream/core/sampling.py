"""The one place that turns logits into probabilities, and the one source of randomness.

Verification and drafters ask a `Randomness` to accept with a probability or to draw from a
distribution; tests put in its place one that enumerates every outcome.
"""

import math
from dataclasses import dataclass
from typing import Protocol

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


class Randomness(Protocol):
    """What verification and drafters need of chance."""

    def accept(self, probability: float) -> bool:
        """True with `probability`."""

    def draw(self, probabilities: torch.Tensor) -> int:
        """An index drawn from (V,) `probabilities`."""


class SeededRandomness:
    """Randomness from one generator per prompt, so a prompt's answer depends on its seed alone."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def accept(self, probability: float) -> bool:
        return torch.rand((), generator=self.generator, dtype=torch.float64).item() < probability

    def draw(self, probabilities: torch.Tensor) -> int:
        cumulative = probabilities.detach().double().cpu().cumsum(-1)
        point = torch.rand((), generator=self.generator, dtype=torch.float64) * cumulative[-1]
        return int(torch.searchsorted(cumulative, point, right=True))
