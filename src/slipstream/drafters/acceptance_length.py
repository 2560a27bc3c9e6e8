"""Rules for the length of a draft that ask a trained acceptance head: SpecDec++ and DISCO."""

import copy

from torch import nn

from slipstream.core.errors import InputError
from slipstream.drafters.draft_length import Below, DraftLength, Drawn, Length
from slipstream.speculators.checkpoint import opened
from slipstream.speculators.classifiers import AcceptanceHead
from slipstream.targets.target import Target


class _Classified(DraftLength):
    """Rules that ask an acceptance head; head: it, or its folder."""

    looks_at = "states"

    def __init__(self, head: str | nn.Module, threshold: float):
        if not 0 < threshold < 1:
            raise InputError("length.threshold: must be between 0 and 1, both excluded")
        self.given, self.threshold = head, threshold

    def attach(self, model: Target | None = None) -> DraftLength:
        head = opened(self.given, model, AcceptanceHead, "length.head")
        if head.features.draft is not model:
            raise InputError(
                "length.head: it was made for another draft model; open it for this one, by its "
                "folder"
            )
        attached = copy.copy(self)
        attached.head = head
        return attached

    def scores(self, drawn: Drawn) -> list[float]:
        """What the head says of each token drawn: how surely it is accepted."""
        features = self.head.features
        told = features.of_drawn(features.draft.norm(drawn.hidden), drawn.tokens, drawn.logits)
        return self.head(told)[:, 0].sigmoid().tolist()


class AnyRejected(_Classified):
    """SpecDec++: stop once the probability that some token of the draft is rejected exceeds the
    threshold: 1 - a_1 a_2 ... a_n > threshold."""

    def start(self) -> Length:
        return _AllAccepted(self.threshold)


class _AllAccepted(Length):
    def __init__(self, threshold: float):
        self.threshold = threshold
        self.begin()

    def begin(self) -> None:
        self.all_accepted = 1.0

    def stops(self, score: float) -> bool:
        self.all_accepted *= score
        return 1 - self.all_accepted > self.threshold


class LastRejected(_Classified):
    """A classifier of single tokens, as DISCO has it (Mamou et al. 2024): stop as soon as the head
    says less than the threshold of a token. It was trained with rejections weighted up, so what it
    says is below the true probability of acceptance."""

    def start(self) -> Length:
        return Below(self.threshold)
