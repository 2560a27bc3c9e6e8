"""SPRINTER's verifier: one linear layer and a sigmoid (section 3.2).

It says whether a drafted token is acceptable, q(x) / p(x) <= lambda, without asking the target. One
output for each of several lambdas: separate verifiers on the same features, trained in one pass.
"""

from dataclasses import dataclass
from math import inf, log
from typing import ClassVar

import torch

from slipstream.core.errors import InputError
from slipstream.speculators.base import SpeculatorConfig
from slipstream.speculators.classifier import Classifier
from slipstream.targets.target import Target


@dataclass(frozen=True)
class SprinterConfig(SpeculatorConfig):
    """features, judged: as in `Classifier`; ratios: the lambdas, one output each."""

    kind: ClassVar[str] = "sprinter"
    features: tuple[str, ...] = ("hidden",)
    ratios: tuple[float, ...] = (1.0, 1.2, 1.5)
    judged: dict[str, str] | None = None

    def __post_init__(self) -> None:
        numbers = all(isinstance(ratio, int | float) for ratio in self.ratios)
        if not self.ratios or not numbers or any(not 0 < ratio < inf for ratio in self.ratios):
            raise InputError("speculator.ratios: each lambda must be a finite number above 0")


class SprinterVerifier(Classifier):
    """A score for each lambda of the config; the sigmoid of a score is the probability that the
    drafted token is acceptable."""

    kind = SprinterConfig.kind
    Config = SprinterConfig

    def __init__(self, draft: Target, config: SprinterConfig):
        super().__init__(draft, config, width=len(config.ratios))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(..., F) -> (..., number of ratios) scores."""
        return self.linear(features)

    def labels(self, log_ratios: torch.Tensor) -> torch.Tensor:
        """(n,) log(q / p) of drafted tokens -> (n, number of ratios), 1 where q / p <= lambda."""
        bounds = torch.tensor([log(ratio) for ratio in self.config.ratios])
        return (log_ratios[:, None] <= bounds.to(log_ratios)).float()

    @property
    def outputs(self) -> list[str]:
        return [f"lambda_{ratio:g}" for ratio in self.config.ratios]

    def output_of(self, ratio: float) -> int:
        """Which output is for this lambda; `InputError` if none is."""
        if ratio <= 0:
            raise InputError("ratio: lambda must be above 0")
        if ratio not in self.config.ratios:
            raise InputError(
                f"ratio: the verifier knows lambda {', '.join(map(str, self.config.ratios))} and "
                f"not {ratio}; choose one of them, or train one with speculator.ratios=[{ratio}]"
            )
        return self.config.ratios.index(ratio)
