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

from slipstream.core.settings import Amount, Le, Len, Positive, Size
from slipstream.speculators.base import Speculator, SpeculatorConfig
from slipstream.targets.target import Target

FEATURES = ("hidden", "token", "distribution", "rank")
NUM_SHAPES = 3
NUM_RANKS = 3
# Logarithms that differ by less are those of the same probability, rounded differently.
SAME = 1e-4
# How far behind, in nats, a token is said to be that cannot be drawn.
FARTHEST = 100.0


def shape_of(logs: torch.Tensor) -> torch.Tensor:
    """(..., V) log-probabilities of the draft model -> (..., 3): entropy in nats, the largest
    probability, and how much larger its logarithm is than the second's.

    >>> shape_of(torch.tensor([0.5, 0.5]).log()).tolist()  # log 2, 1/2, 0
    [0.6931471824645996, 0.5, 0.0]
    """
    finite = logs.clamp(min=torch.finfo(logs.dtype).min)  # 0 log 0 is 0
    entropy = -(logs.exp() * finite).sum(-1, keepdim=True)
    first, second = logs.topk(2).values.split(1, dim=-1)
    return torch.cat([entropy, first.exp(), first - second], dim=-1)


def rank_of(log_probabilities: torch.Tensor, shapes: torch.Tensor) -> torch.Tensor:
    """(...) log-probabilities of tokens, and (..., 3) `shape_of` what they were drawn from -> (...,
    3): the probability, how much smaller its logarithm is than the largest's, and 1 for the most
    probable token, else 0.

    >>> logs = torch.tensor([0.75, 0.25]).log()
    >>> rank_of(logs[1], shape_of(logs)).tolist()  # 1/4, log 3, not the first
    [0.25, 1.0986123085021973, 0.0]
    """
    logs = log_probabilities.float()[..., None]
    behind = (shapes[..., 1:2].float().log() - logs).clamp(0, FARTHEST)
    return torch.cat([logs.exp(), behind, (behind < SAME).float()], dim=-1)


class DraftFeatures:
    """What is told of a drafted token, s(x, prefix) of SPRINTER (section 3), all of it from the
    draft model's own forward: features of the kinds in `kinds`, in this order.

    'hidden' (D): the draft model's last hidden state, as its LM head takes it, that the token was
    drawn from; it knows the prefix alone. 'token' (E): the token's embedding. 'distribution' (4):
    `shape_of` the distribution it was drawn from, and the token's log-probability there. 'rank'
    (3): `rank_of` the token in this distribution.
    """

    def __init__(self, draft: Target, kinds: tuple[str, ...]):
        self.draft, self.kinds = draft, kinds
        sizes = (draft.head.in_features, draft.embedding_size, NUM_SHAPES + 1, NUM_RANKS)
        self.size = sum(size for kind, size in zip(FEATURES, sizes, strict=True) if kind in kinds)

    def __call__(
        self,
        normed: torch.Tensor,
        tokens: torch.Tensor,
        shapes: torch.Tensor | None,
        log_probabilities: torch.Tensor | None,
    ) -> torch.Tensor:
        """(..., size) float32 features of drafted tokens.

        normed: (..., D) states after the final norm; tokens: (...); shapes: (..., 3) of `shape_of`;
        log_probabilities: (...) of the tokens in the draft model's distribution; these two None
        where neither 'distribution' nor 'rank' is among the kinds.
        """
        parts = [normed] if "hidden" in self.kinds else []
        if "token" in self.kinds:
            parts.append(self.draft.token_embeddings(tokens))
        if "distribution" in self.kinds:
            parts += [shapes, log_probabilities[..., None]]
        if "rank" in self.kinds:
            parts.append(rank_of(log_probabilities, shapes))
        return torch.cat([part.float() for part in parts], -1)

    def of_drawn(
        self, normed: torch.Tensor, tokens: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """(P, size) of tokens (P,), drawn where the draft model has the states (P, D), after its
        final norm, and the logits (P, V)."""
        shapes = drawn = None
        if {"distribution", "rank"} & set(self.kinds):
            logs = logits.float().log_softmax(-1)
            shapes, drawn = shape_of(logs), logs.gather(1, tokens[:, None])[:, 0]
        return self(normed, tokens, shapes, drawn)


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
