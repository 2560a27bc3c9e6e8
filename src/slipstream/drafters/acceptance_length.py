"""Rules for the length of a draft that ask a trained acceptance head: SpecDec++ and DISCO."""

from dataclasses import dataclass, field
from typing import Self

from slipstream.core.errors import InputError
from slipstream.core.settings import Inside
from slipstream.drafters.draft_length import DraftLength, Grown
from slipstream.speculators.checkpoint import opened
from slipstream.speculators.classifiers import AcceptanceHead
from slipstream.targets.target import Target


@dataclass(eq=False)
class LastRejected(DraftLength):
    """A classifier of single tokens, as DISCO has it (Mamou et al. 2024): stop as soon as the head
    says less than the threshold of a token. It was trained with rejections weighted up, so what it
    says is below the true probability of acceptance.

    head: the acceptance head, or its folder.
    """

    looks_at = "states"
    head: str | AcceptanceHead
    threshold: Inside = field()

    def attach(self, model: Target | None = None) -> Self:
        attached = super().attach()
        attached.head = opened(self.head, model, AcceptanceHead, "length.head")
        if attached.head.features.draft is not model:
            raise InputError(
                "length.head: it was made for another draft model; open it for this one, by its "
                "folder"
            )
        return attached

    def scores(self, grown: Grown) -> list[float]:
        """What the head says of each token drawn: how surely it is accepted."""
        features = self.head.features
        told = features.of_drawn(features.draft.norm(grown.hidden), grown.tokens, grown.logits)
        return self.head(told)[:, 0].sigmoid().tolist()


class AnyRejected(LastRejected):
    """SpecDec++: stop once the probability that some token of the draft is rejected exceeds the
    threshold: 1 - a_1 a_2 ... a_n > threshold."""

    all_accepted = 1.0

    def begin(self) -> None:
        self.all_accepted = 1.0

    def stops(self, score: float) -> bool:
        self.all_accepted *= score
        return 1 - self.all_accepted > self.threshold
