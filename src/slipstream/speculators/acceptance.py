"""SpecDec++'s acceptance head: the probability that the target accepts a drafted token.

A small residual network on the draft model's features, trained on min(1, p(x) / q(x)) with
rejections weighted up. Source: Huang et al. 2024, "SpecDec++: Boosting Speculative Decoding via
Adaptive Candidate Lengths", section 3. It decides only how far is drafted: decoding stays exact.
"""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import nn

from slipstream.core.errors import InputError
from slipstream.speculators.base import SpeculatorConfig
from slipstream.speculators.classifier import Classifier
from slipstream.targets.target import Target


@dataclass(frozen=True)
class AcceptanceConfig(SpeculatorConfig):
    """features, judged: as in `Classifier`; width, depth: of the residual network;
    rejection_weight: how much more a rejection counts than an acceptance."""

    kind: ClassVar[str] = "acceptance"
    features: tuple[str, ...] = ("hidden", "token", "distribution")
    width: int = 64
    depth: int = 3
    rejection_weight: float = 6.0
    judged: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if self.width < 1 or self.depth < 0 or not 0 < self.rejection_weight < inf:
            raise InputError(
                "speculator: width must be at least 1, depth at least 0 and rejection_weight a "
                "finite number above 0"
            )


class AcceptanceHead(Classifier):
    """One score; its sigmoid says how surely the drafted token is accepted: a / (a + w (1 - a)) for
    a probability a of acceptance, with rejections weighted by w."""

    kind = AcceptanceConfig.kind
    Config = AcceptanceConfig
    outputs = ("accepted",)

    def __init__(self, draft: Target, config: AcceptanceConfig):
        super().__init__(draft, config, config.width)
        self.pos_weight = 1 / config.rejection_weight
        self.blocks = nn.ModuleList(
            nn.Linear(config.width, config.width) for _ in range(config.depth)
        )
        self.head = nn.Linear(config.width, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(..., F) -> (..., 1) scores."""
        hidden = self.linear(features)
        for block in self.blocks:
            hidden = hidden + nn.functional.silu(block(hidden))
        return self.head(nn.functional.silu(hidden))

    def labels(self, log_ratios: torch.Tensor) -> torch.Tensor:
        """(n,) log(q / p) of drafted tokens -> (n, 1) probabilities of acceptance min(1, p / q)."""
        return (-log_ratios).clamp(max=0).exp()[:, None]
