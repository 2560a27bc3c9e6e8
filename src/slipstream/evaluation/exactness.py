"""Where a method's greedy output leaves plain decoding's, and whether rounding explains it."""

from dataclasses import dataclass
from itertools import zip_longest

import torch

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.decoding.request import Batch
from slipstream.drafters.base import Attached, Drafter, Verified
from slipstream.speculators.base import causal_rows
from slipstream.targets.target import Target

# How many units of the dtype's precision, at the logits' size, two tokens may be apart at a numeric
# tie. In 16 bits two units are the rounding of the logits alone (of two tokens, in two
# computations, by half a unit each); hidden states are rounded as coarsely before, for which as
# much is added. In 32 bits what counts are sums in another order, over all layers.
TIE_UNITS = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 64, torch.float64: 64}


@dataclass(frozen=True)
class Divergence:
    """First difference of one answer. gap: how far the found token's logit is below the best there,
    infinite where one answer ends and the other goes on."""

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
            f"of {self.expected}; their logits are {self.gap:.2g} apart, {cause}"
        )


class PlainReference:
    """Plain decoding of a target."""

    def __init__(self, target: Target, limits: Limits):
        self.target, self.decoder = target, PlainDecoder(target, Sampling(), limits)

    def generate(self, prompt_ids: list[int]) -> list[int]:
        self.prompt_ids, self.answer = prompt_ids, self.decoder.generate(prompt_ids).ids
        return self.answer

    @torch.inference_mode()
    def logits(self, position: int) -> torch.Tensor:
        prefix = torch.tensor([self.prompt_ids + self.answer[:position]], device=self.target.device)
        return self.target.logits(causal_rows(self.target, prefix).hidden[0, -1])


class DraftlessReference(Engine):
    """A drafter's engine that never drafts: the reference where the drafter is part of the model,
    as streams are in shared mode."""

    def __init__(self, target: Target, drafter: Drafter | Attached, limits: Limits):
        super().__init__(target, drafter, Sampling(), limits, budget=1)

    def generate(self, prompt_ids: list[int]) -> list[int]:
        self.seen: list[torch.Tensor] = []
        return super().generate(prompt_ids).ids

    def logits(self, position: int) -> torch.Tensor:
        return self.seen[position]

    def _decided(self, batch: Batch, verified: Verified) -> None:
        logits = verified.logits
        if logits is None:
            logits = self.target.logits(verified.rows.hidden[:, verified.last])
        self.seen.append(logits[0, -1])
        super()._decided(batch, verified)


Reference = PlainReference | DraftlessReference
"""Greedy decoding of one token per forward, which an exact method must agree with: `generate`
answers, and `logits(position)`, (V,), are those from which a token of the last answer was chosen.
"""


def first_divergence(
    method: str, prompt: int, reference: Reference, prompt_ids: list[int], ids: list[int]
) -> Divergence | None:
    """Compare `ids` with the reference's answer; None if they are identical."""
    expected = reference.generate(prompt_ids)
    if expected == ids:
        return None
    pairs = enumerate(zip_longest(expected, ids, fillvalue=-1))
    position, wanted, found = next((place, a, b) for place, (a, b) in pairs if a != b)
    gap, numeric_tie = torch.inf, False
    if -1 not in (wanted, found):
        logits = reference.logits(position)
        best = logits.float().max().item()
        gap = best - logits[found].item()
        unit = torch.finfo(logits.dtype).eps * max(1.0, abs(best))
        numeric_tie = gap <= TIE_UNITS[logits.dtype] * unit
    return Divergence(method, prompt, position, wanted, found, gap, numeric_tie)
