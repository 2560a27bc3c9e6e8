"""When a draft is long enough: rules that look at every token drawn, and keep it.

Any such rule leaves decoding exact: whether one more token is drafted depends only on tokens that
are part of the draft already, and verification goes level by level.
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import nn

from slipstream.core.errors import InputError
from slipstream.core.transfer import on_device
from slipstream.speculators.acceptance import AcceptanceHead
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.draft_features import shape_of
from slipstream.targets.target import Target


@dataclass(frozen=True)
class Drawn:
    """P sequences of a batch that have just drawn a token each.

    places: of them in the batch; hidden: (P, D) the draft model's states before the final norm;
    logits: (P, V) of the draft model, before temperature, top-k and top-p; tokens: P of them.
    """

    places: list[int]
    hidden: torch.Tensor
    logits: torch.Tensor
    tokens: list[int]


class DraftLength:
    """Base of all rules, and the simplest: as long as there is room."""

    def bind(self, model: Target) -> None:
        """Called when an engine is made, with the draft model."""

    def begin(self, count: int) -> None:
        """A batch of `count` sequences begins."""

    def start(self) -> None:
        """All sequences of the batch begin another draft."""

    def stops(self, drawn: Drawn) -> list[bool]:
        """Whether the draft of each of these sequences ends with the token drawn."""
        return [False] * len(drawn.places)

    def observe(self, place: int, drafted: int, accepted: int) -> None:
        """What became of the draft of one sequence."""

    def leave(self, kept: list[int]) -> None:
        """Only these sequences of the batch go on (ascending)."""


class EntropyBound(DraftLength):
    """AdaEDL: stop when a lower bound on the probability of acceptance, 1 - sqrt(gamma H(q)), falls
    below a threshold that follows the share of accepted tokens.

    scale: gamma; threshold: where lambda starts; goal: the share of accepted tokens below which
    lambda rises by `step` (a short draft), above which it falls; memory, inertia: how slowly the
    measured share and lambda move. Source: Agrawal et al. 2024, "AdaEDL: Early Draft Stopping for
    Speculative Decoding of Large Language Models via an Entropy-based Lower Bound on Token
    Acceptance Probability"; the threshold moves as in Draft & Verify (Zhang et al. 2023).
    """

    def __init__(
        self,
        scale: float,
        threshold: float,
        goal: float,
        step: float,
        memory: float,
        inertia: float,
    ):
        if not 0 < scale < inf:
            raise InputError("length.scale: must be a finite number above 0")
        if not -inf < threshold < inf or not 0 <= step < inf:
            raise InputError("length: threshold must be finite, and step finite and not below 0")
        for name, value in (("goal", goal), ("memory", memory), ("inertia", inertia)):
            if not 0 <= value <= 1:
                raise InputError(f"length.{name}: must be between 0 and 1")
        self.scale, self.threshold, self.goal, self.step = scale, threshold, goal, step
        self.memory, self.inertia = memory, inertia
        self.thresholds: list[float] = []
        self.shares: list[float] = []

    def begin(self, count: int) -> None:
        self.thresholds, self.shares = [self.threshold] * count, [self.goal] * count

    def stops(self, drawn: Drawn) -> list[bool]:
        entropies = shape_of(drawn.logits)[:, 0].tolist()
        return [
            1 - (self.scale * entropy) ** 0.5 < self.thresholds[place]
            for place, entropy in zip(drawn.places, entropies, strict=True)
        ]

    def observe(self, place: int, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        share = self.memory * self.shares[place] + (1 - self.memory) * accepted / drafted
        now = self.thresholds[place]
        wanted = now + (self.step if share < self.goal else -self.step)
        self.shares[place] = share
        self.thresholds[place] = self.inertia * now + (1 - self.inertia) * wanted

    def leave(self, kept: list[int]) -> None:
        self.thresholds = [self.thresholds[place] for place in kept]
        self.shares = [self.shares[place] for place in kept]


class _Classified(DraftLength):
    """Rules that ask an acceptance head; head: it, or its folder."""

    def __init__(self, head: str | nn.Module, threshold: float):
        if not 0 < threshold < 1:
            raise InputError("length.threshold: must be between 0 and 1, both excluded")
        self.given, self.threshold = head, threshold

    def bind(self, model: Target) -> None:
        head = load_speculator(self.given, model) if isinstance(self.given, str) else self.given
        kind = getattr(head, "kind", type(head).__name__)
        if kind != AcceptanceHead.kind:
            raise InputError(
                f"length.head: a speculator of kind {kind!r} is no acceptance head; train one with "
                "experiment=acceptance_small"
            )
        if head.features.draft is not model:
            raise InputError(
                "length.head: it was made for another draft model; open it for this one, by its "
                "folder"
            )
        self.head = head

    def accepted(self, drawn: Drawn) -> list[float]:
        """What the head says of each token drawn: how surely it is accepted."""
        tokens = on_device(drawn.tokens, drawn.hidden.device)
        features = self.head.features.of_drawn(drawn.hidden, tokens, drawn.logits)
        return self.head(features)[:, 0].sigmoid().tolist()


class AnyRejected(_Classified):
    """SpecDec++: stop once the probability that some token of the draft is rejected exceeds the
    threshold: 1 - a_1 a_2 ... a_n > threshold."""

    def begin(self, count: int) -> None:
        self.all_accepted = [1.0] * count

    def start(self) -> None:
        self.all_accepted = [1.0] * len(self.all_accepted)

    def stops(self, drawn: Drawn) -> list[bool]:
        for place, accepted in zip(drawn.places, self.accepted(drawn), strict=True):
            self.all_accepted[place] *= accepted
        return [1 - self.all_accepted[place] > self.threshold for place in drawn.places]

    def leave(self, kept: list[int]) -> None:
        self.all_accepted = [self.all_accepted[place] for place in kept]


class LastRejected(_Classified):
    """A classifier of single tokens, as DISCO has it (Mamou et al. 2024): stop as soon as the head
    says less than the threshold of a token. It was trained with rejections weighted up, so what it
    says is below the true probability of acceptance."""

    def stops(self, drawn: Drawn) -> list[bool]:
        return [accepted < self.threshold for accepted in self.accepted(drawn)]
