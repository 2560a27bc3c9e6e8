"""Medusa-1 as a drafter: heads guess the coming tokens from the last accepted node's state.

The tree is the paper's (Cai et al. 2024): of all paths of guesses the most accurate ones, by the
product of the accuracies that the heads' ranks had on validation prompts. It depends on the text in
its tokens alone. All stays on the device.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.core.growth import grow
from slipstream.core.trees import Trees
from slipstream.drafters.base import Attached, Drafter, Session, Verified
from slipstream.speculators.checkpoint import opened
from slipstream.speculators.medusa import MedusaSpeculator
from slipstream.targets.target import Target


@dataclass(eq=False)
class Medusa(Drafter):
    """Drafts with a `MedusaSpeculator`, given itself or as a folder."""

    speculator: MedusaSpeculator | str | Path

    def attach(self, target: Target) -> "AttachedMedusa":
        speculator = opened(self.speculator, target, MedusaSpeculator)
        return AttachedMedusa(target, speculator.placed(target))


class MedusaSession(Session):
    """Keeps nothing from step to step."""

    def __init__(self, medusa: "AttachedMedusa", *_):
        self.target, self.speculator = medusa.target, medusa.speculator

    @torch.no_grad()
    def draft(self, verified: Verified, budget: int) -> Trees:
        accuracies, roots = self.speculator.accuracies.float(), verified.next_tokens
        levels = min(len(accuracies), verified.most_room - 1)
        if budget < 2 or levels < 1:
            return Trees.roots(roots)
        hidden = verified.rows.hidden[verified.each, verified.last]
        logits = self.speculator.logits(self.target, self.target.norm(hidden))[:, :levels]
        ranks = torch.arange(min(accuracies.shape[1], budget - 1), device=roots.device)
        # The same children under every parent: (B, levels, parents, children).
        shape = len(roots), levels, len(ranks), len(ranks)
        return grow(
            roots,
            logits.topk(len(ranks)).indices,
            ranks.expand(shape),
            accuracies[:levels, None, : len(ranks)].expand(shape),
            budget,
            (verified.room - 1).clamp(max=levels),
        )


class AttachedMedusa(Attached):
    session = MedusaSession

    def __init__(self, target: Target, speculator: MedusaSpeculator):
        super().__init__(target)
        self.speculator, self.trained_length = speculator, speculator.trained_length
