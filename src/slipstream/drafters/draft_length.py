"""When a draft is long enough: rules that say how far to draft, or look at every token drawn.

Any such rule leaves decoding exact: whether one more token is drafted depends only on tokens that
are part of the draft already, and verification goes level by level.
"""

import sys
from dataclasses import dataclass
from math import ceil, inf

import torch

from slipstream.core.errors import InputError
from slipstream.core.transfer import on_device
from slipstream.speculators.draft_features import shape_of
from slipstream.targets.target import Target


@dataclass(frozen=True)
class Drawn:
    """P sequences of a batch that have just drawn a token each.

    places: of them in the batch; logits: (P, V) that the tokens were drawn from, before
    temperature, top-k and top-p, None where there are none; tokens: P of them, or the likeliest
    ones where a level of a tree has several; hidden: (P, D) the draft model's states before the
    final norm, None for other drafters. sure: P numbers, how sure a drafter without logits is of
    each token; None with logits.
    """

    places: list[int]
    logits: torch.Tensor | None
    tokens: list[int]
    hidden: torch.Tensor | None = None
    sure: list[float] | None = None

    def confidences(self) -> list[float]:
        """(P,) how probable the drafter thinks each token."""
        if self.sure is not None:
            return self.sure
        tokens = on_device(self.tokens, self.logits.device)[:, None]
        return self.logits.float().softmax(-1).gather(1, tokens)[:, 0].tolist()

    def largest(self) -> list[float]:
        """(P,) how probable the drafter thinks the likeliest token in the place of each."""
        if self.sure is not None:
            return self.sure
        return self.logits.float().softmax(-1).amax(-1).tolist()


class DraftLength:
    """Base of all rules, and the simplest: as long as there is room.

    looks_at: what `stops` needs to know of a draft: "nothing", the "confidence" in its tokens, the
    "logits" that they are drawn from, or the "states" of a draft model as well.
    """

    looks_at = "nothing"

    def bind(self, model: Target) -> None:
        """Called when an engine is made, with the draft model, by the drafter that has one."""

    def begin(self, count: int) -> None:
        """A batch of `count` sequences begins."""

    def start(self) -> None:
        """All sequences of the batch begin another draft."""

    def limit(self, place: int) -> int:
        """Most tokens of the draft that the sequence begins."""
        return sys.maxsize

    def stops(self, drawn: Drawn) -> list[bool]:
        """Whether the draft of each of these sequences ends with the token drawn."""
        return [False] * len(drawn.places)

    def observe(self, place: int, drafted: int, accepted: int) -> None:
        """What became of the draft of one sequence."""

    def leave(self, kept: list[int]) -> None:
        """Only these sequences of the batch go on (ascending)."""

    def forget(self) -> None:
        """Forget what earlier prompts taught."""


def check_length(length: DraftLength, known: tuple[str, ...], drafter: str) -> DraftLength:
    """`length`, unless it looks at more than the drafter knows (InputError)."""
    if length.looks_at not in known:
        raise InputError(
            f"drafter.length: {type(length).__name__} looks at the {length.looks_at} of a draft "
            f"model, which {drafter} has none of; choose +length@drafter.length=gammatune"
        )
    return length


class _Counting(DraftLength):
    """Rules that follow how many tokens were accepted, with a length for each sequence.

    initial: the length that the first prompt begins with; carry: whether later prompts begin with
    the length that the one before ended with (of a batch: the one that was observed last).
    """

    def __init__(self, initial: float, carry: bool):
        if not 1 <= initial < inf:
            raise InputError("length.initial: must be a finite number of at least 1")
        self.initial, self.carry = initial, carry
        self.carried = initial
        self.lengths: list[float] = []

    def begin(self, count: int) -> None:
        self.lengths = [self.carried if self.carry else self.initial] * count

    def limit(self, place: int) -> int:
        return ceil(self.lengths[place])

    def observe(self, place: int, drafted: int, accepted: int) -> None:
        self.carried = self.lengths[place] = self.following(place, drafted, accepted)

    def forget(self) -> None:
        self.carried = self.initial

    def following(self, place: int, drafted: int, accepted: int) -> float:
        """The length of the next draft."""
        raise NotImplementedError

    def leave(self, kept: list[int]) -> None:
        self.lengths = [self.lengths[place] for place in kept]


class Heuristic(_Counting):
    """transformers' schedule "heuristic": two tokens more after a draft that was accepted whole,
    else one less. It carries its length over from prompt to prompt ("heuristic_transient" does
    not). Source: `GenerationConfig.num_assistant_tokens_schedule`, where the first length is 20."""

    def following(self, place: int, drafted: int, accepted: int) -> float:
        if drafted < self.limit(place) and accepted == drafted:
            return self.lengths[place]
        return max(1.0, self.lengths[place] + (2 if accepted == drafted else -1))


class GammaTune(_Counting):
    """A draft length that follows a moving mean of the accepted tokens (GammaTune, Algorithm 1,
    whose lines are read in the one way in which all act): A accepted tokens, `bonus` more if the
    whole draft was accepted; then length <- clip((1 - rate) length + rate A, least, most), and its
    ceiling is drafted.

    rate: eta; bonus: delta; threshold: GammaTune+, which ends a draft with a token drawn where the
    draft model's largest probability is below it; None for GammaTune. A draft that something else
    cut short (the end of an answer, the budget) and that was accepted whole says nothing about the
    length, and changes nothing.
    """

    def __init__(
        self,
        initial: float,
        rate: float,
        bonus: float,
        least: float,
        most: float,
        threshold: float | None,
        carry: bool,
    ):
        super().__init__(initial, carry)
        if not 0 < rate <= 1:
            raise InputError("length.rate: must be above 0 and at most 1")
        if not 0 <= bonus < inf:
            raise InputError("length.bonus: must be a finite number of at least 0")
        if not 1 <= least <= most < inf:
            raise InputError("length: needs 1 <= least <= most, both finite")
        if threshold is not None and not 0 < threshold < 1:
            raise InputError("length.threshold: must be between 0 and 1, both excluded, or null")
        self.rate, self.bonus, self.least, self.most = rate, bonus, least, most
        self.threshold = threshold
        self.looks_at = "nothing" if threshold is None else "confidence"
        self.stopped: set[int] = set()

    def start(self) -> None:
        self.stopped = set()

    def stops(self, drawn: Drawn) -> list[bool]:
        if self.threshold is None:
            return super().stops(drawn)
        stops = [probability < self.threshold for probability in drawn.largest()]
        self.stopped |= {place for place, stop in zip(drawn.places, stops, strict=True) if stop}
        return stops

    def following(self, place: int, drafted: int, accepted: int) -> float:
        length, limit = self.lengths[place], self.limit(place)
        if accepted == drafted < limit and place not in self.stopped:
            return length
        reached = accepted + (self.bonus if accepted == limit else 0)
        return min(self.most, max(self.least, (1 - self.rate) * length + self.rate * reached))


class AssistantThreshold(DraftLength):
    """transformers' `assistant_confidence_threshold`: a draft ends with a token of which the draft
    model itself is less sure than the threshold."""

    looks_at = "confidence"

    def __init__(self, threshold: float):
        if not 0 < threshold < 1:
            raise InputError("length.threshold: must be between 0 and 1, both excluded")
        self.threshold = threshold

    def stops(self, drawn: Drawn) -> list[bool]:
        return [probability < self.threshold for probability in drawn.confidences()]


class EntropyBound(DraftLength):
    """AdaEDL: stop when a lower bound on the probability of acceptance, 1 - sqrt(gamma H(q)), falls
    below a threshold that follows the share of accepted tokens.

    scale: gamma; threshold: where lambda starts; goal: the share of accepted tokens below which
    lambda rises by `step` (a short draft), above which it falls; memory, inertia: how slowly the
    measured share and lambda move. Source: Agrawal et al. 2024, "AdaEDL: Early Draft Stopping for
    Speculative Decoding of Large Language Models via an Entropy-based Lower Bound on Token
    Acceptance Probability"; the threshold moves as in Draft & Verify (Zhang et al. 2023).
    """

    looks_at = "logits"

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
