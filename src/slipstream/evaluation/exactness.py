"""Where a method's greedy output leaves plain decoding's, and whether rounding explains it."""

from dataclasses import dataclass

import torch

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.plain import PlainDecoder
from slipstream.targets.target import Target

ROUNDING_STEPS = 64
"""A gap of so many units of the dtype's precision, at the logits' size, counts as a numeric tie."""


@dataclass(frozen=True)
class Divergence:
    """First difference of one answer. gap: distance of the two best logits there."""

    method: str
    prompt: int
    position: int
    expected: int
    found: int
    gap: float
    numeric_tie: bool

    def sentence(self) -> str:
        cause = "a numeric tie" if self.numeric_tie else "not explained by rounding: a bug"
        return (
            f"{self.method}, prompt {self.prompt}: token {self.position} is {self.found} instead "
            f"of {self.expected}; the two best logits are {self.gap:.2g} apart, {cause}"
        )


@torch.inference_mode()
def first_divergence(
    method: str, prompt: int, target: Target, prompt_ids: list[int], ids: list[int], limits: Limits
) -> Divergence | None:
    """Compare `ids` with plain greedy decoding; None if they are identical."""
    plain = PlainDecoder(target, Sampling(), limits).generate(prompt_ids).ids
    if plain == ids:
        return None
    pairs = list(zip(plain, ids, strict=False))
    position = next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
    prefix = prompt_ids + plain[:position]
    positions = torch.arange(len(prefix), device=target.device)[None]
    rows = target.forward(torch.tensor([prefix], device=target.device), positions, None, None)
    best = target.logits(rows.hidden[0, -1]).float().topk(2).values.tolist()
    gap = best[0] - best[1]
    precision = torch.finfo(target.dtype).eps * max(1.0, abs(best[0])) * ROUNDING_STEPS
    return Divergence(
        method,
        prompt,
        position,
        plain[position] if position < len(plain) else -1,
        ids[position] if position < len(ids) else -1,
        gap,
        gap <= precision,
    )
