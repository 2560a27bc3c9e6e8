"""What classifiers of drafted tokens have in common: features, labels, loss, standardised inputs.

They are trained for a draft model, on what another target says of its drafts.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.speculators.base import Speculator, SpeculatorConfig
from slipstream.speculators.draft_features import DraftFeatures
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
