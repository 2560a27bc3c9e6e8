"""Rules for the length of a draft that ask a trained acceptance head: SpecDec++ and DISCO."""

from torch import nn

from slipstream.core.errors import InputError
from slipstream.core.transfer import on_device
from slipstream.drafters.draft_length import DraftLength, Drawn
from slipstream.speculators.acceptance import AcceptanceHead
from slipstream.speculators.checkpoint import load_speculator
from slipstream.targets.target import Target


class _Classified(DraftLength):
    """Rules that ask an acceptance head; head: it, or its folder."""

    looks_at = "states"

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
        features, tokens = self.head.features, on_device(drawn.tokens, drawn.hidden.device)
        told = features.of_drawn(features.draft.norm(drawn.hidden), tokens, drawn.logits)
        return self.head(told)[:, 0].sigmoid().tolist()


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
