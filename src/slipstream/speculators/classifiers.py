"""Small classifiers of drafted tokens: SPRINTER's verifier and SpecDec++'s acceptance head.

Both are trained for a draft model, on what another target says of its drafts. The verifier says
whether a token is acceptable without asking the target (SPRINTER, section 3.2). The acceptance head
decides only how far is drafted, so decoding stays exact (Huang et al. 2024, "SpecDec++: Boosting
Speculative Decoding via Adaptive Candidate Lengths", section 3).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.core.errors import InputError
from slipstream.core.settings import Amount, Le, Len, Positive, Size
from slipstream.speculators.base import Speculator, SpeculatorConfig
from slipstream.speculators.draft_features import FEATURES, DraftFeatures
from slipstream.targets.target import Target


class Classifier(Speculator):
    """Scores of features, one for each of `outputs`; the sigmoid of a score is the probability
    that a drafted token is good. pos_weight: how much a good one counts in the loss.

    Of a config it reads `features`, kinds of `DraftFeatures`, and `judged`, the fingerprint of the
    target whose probabilities made the labels, None before training.
    """

    pos_weight = 1.0
    outputs: Sequence[str]

    def __init__(self, draft: Target, config: SpeculatorConfig, width: int):
        """width: of what the first layer, `linear`, makes of the features."""
        super().__init__()
        self.config = config
        self.features = DraftFeatures(draft, tuple(config.features))
        self.linear = nn.Linear(self.features.size, width)

    @abstractmethod
    def labels(self, log_ratios: torch.Tensor) -> torch.Tensor:
        """(n,) log(q / p) of drafted tokens -> (n, outputs), probabilities that they are good."""

    def losses(
        self, features: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, F) features, (n, outputs) labels -> binary cross-entropy, scores (n, outputs)."""
        scores = self(features)
        weight = scores.new_tensor(self.pos_weight)
        return F.binary_cross_entropy_with_logits(scores, labels, pos_weight=weight), scores

    @torch.no_grad()
    def fold_in(self, mean: torch.Tensor, scale: torch.Tensor) -> None:
        """Let it, trained on (features - mean) / scale, take the features themselves."""
        self.linear.weight /= scale
        self.linear.bias -= self.linear.weight @ mean


@dataclass(frozen=True)
class SprinterConfig(SpeculatorConfig):
    """features, judged: as in `Classifier`; ratios: the lambdas, one output each."""

    kind: ClassVar[str] = "sprinter"
    features: Annotated[Sequence[Literal[FEATURES]], Len(1)] = ("hidden",)
    ratios: Annotated[Sequence[Positive], Len(1)] = (1.0, 1.2, 1.5)
    judged: dict[str, str] | None = None


class SprinterVerifier(Classifier):
    """One linear layer. For each lambda of the config a verifier of its own, all trained in one
    pass; it says how probably a token is acceptable, q(x) / p(x) <= lambda."""

    kind = SprinterConfig.kind
    Config = SprinterConfig
    title = "SPRINTER verifier"

    def __init__(self, draft: Target, config: SprinterConfig):
        super().__init__(draft, config, width=len(config.ratios))
        self.outputs = [f"lambda_{ratio:g}" for ratio in config.ratios]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(..., F) -> (..., number of ratios) scores."""
        return self.linear(features)

    def labels(self, log_ratios: torch.Tensor) -> torch.Tensor:
        bounds = torch.tensor([log(ratio) for ratio in self.config.ratios])
        return (log_ratios[:, None] <= bounds.to(log_ratios)).float()

    def output_of(self, ratio: float) -> int:
        """Which output is for this lambda; `InputError` if none is."""
        if ratio not in self.config.ratios:
            raise InputError(
                f"ratio: the verifier knows lambda {', '.join(map(str, self.config.ratios))} and "
                f"not {ratio}; choose one of them, or train one with speculator.ratios=[{ratio}]"
            )
        return self.config.ratios.index(ratio)


@dataclass(frozen=True)
class AcceptanceConfig(SpeculatorConfig):
    """features, judged: as in `Classifier`; width, depth: of the residual network;
    rejection_weight: how much more a rejection counts than an acceptance."""

    kind: ClassVar[str] = "acceptance"
    features: Annotated[Sequence[Literal[FEATURES]], Len(1)] = ("hidden", "token", "distribution")
    width: Size = 64
    depth: Annotated[Amount, Le(256)] = 3
    rejection_weight: Positive = 6.0
    judged: dict[str, str] | None = None


class AcceptanceHead(Classifier):
    """A residual network with one output, trained on the probability min(1, p(x) / q(x)) that the
    target accepts a token. With rejections weighted by w it says a / (a + w (1 - a)) for a
    probability a."""

    kind = AcceptanceConfig.kind
    Config = AcceptanceConfig
    title = "acceptance head"
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
            hidden = hidden + F.silu(block(hidden))
        return self.head(F.silu(hidden))

    def labels(self, log_ratios: torch.Tensor) -> torch.Tensor:
        return (-log_ratios).clamp(max=0).exp()[:, None]
