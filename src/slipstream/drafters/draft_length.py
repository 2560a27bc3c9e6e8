"""When a draft is long enough: rules that say how far to draft, or look at every token drawn.

Any such rule leaves decoding exact: whether one more token is drafted depends only on tokens that
are part of the draft already, and verification goes level by level. Where drafts are drawn (a draft
model, sampling), a length that is carried from prompt to prompt makes an answer's tokens depend on
earlier prompts, though not their distribution.
"""

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Self

import torch

from slipstream.core.errors import InputError
from slipstream.core.settings import (
    AtLeast1,
    Inside,
    NotNegative,
    Positive,
    PositiveShare,
    Settings,
    Share,
)
from slipstream.core.trees import Trees
from slipstream.core.verification import agreement
from slipstream.drafters.base import Verified
from slipstream.speculators.classifiers import shape_of
from slipstream.targets.target import Target


@dataclass(frozen=True)
class Grown:
    """P drafts of a batch that have just grown by a token each.

    logits: (P, V) that the tokens were drawn from, before temperature, top-k and top-p; tokens:
    (P,), or the likeliest ones where a level of a tree has several; hidden: (P, D) the draft
    model's states before the final norm, None for other drafters.
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    hidden: torch.Tensor | None = None


class DraftLength(Settings):
    """Base of all rules, and the simplest one: as long as there is room. An object is the settings,
    a copy of them for one attached drafter (`attach`), or one with a request's state (`start`).

    looks_at: what `scores` needs to know of a draft: "nothing", the "confidence" in its tokens, the
    "logits" that they are drawn from, or the "states" of a draft model as well. carries: whether
    lengths depend on the answers to earlier prompts. threshold: a draft ends with a token whose
    score is below it, None for none.
    """

    section, looks_at, carries = "length", "nothing", False
    threshold: float | None = None

    def attach(self, model: Target | None = None) -> Self:
        """For a drafter at work, with its draft model if it has one; what is carried from prompt to
        prompt is its own."""
        return copy.copy(self)

    def start(self) -> Self:
        """For a new request."""
        return copy.copy(self)

    def scores(self, grown: Grown) -> list[float]:
        """(P,) what the rule finds of each token drawn, for `stops`."""
        return [0.0] * len(grown.tokens)

    def begin(self) -> None:
        """Another draft begins."""

    def limit(self) -> int:
        """Most tokens of that draft."""
        return sys.maxsize

    def stops(self, score: float) -> bool:
        """Whether the draft ends with the token of which `scores` says this."""
        return self.threshold is not None and score < self.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        """What became of the draft."""

    def forget(self) -> None:
        """Forget what earlier prompts taught."""


class Lengths:
    """The drafts of a batch: each as long as the rule of its request wants.

    rule: of all of them; each: as the requests follow it; drafted: the last drafts.
    """

    def __init__(self, rule: DraftLength, count: int):
        self.rule, self.each = rule, [rule.start() for _ in range(count)]
        self.drafted: Trees | None = None
        self.outcome = None

    def ask(self, verified: Verified) -> None:
        """Let the host be told what became of the last drafts."""
        if self.drafted is not None:
            agreed = agreement(self.drafted, verified.decided)
            self.outcome = verified.bring(self.drafted.depths.amax(-1), agreed)

    def begin(self, most: Sequence[int]) -> list[int]:
        """How long the next drafts are to be, at most as given."""
        if self.outcome is not None:
            for length, *outcome in zip(self.each, *self.outcome(), strict=True):
                length.observe(*map(int, outcome))
        for length in self.each:
            length.begin()
        return [min(own, length.limit()) for own, length in zip(most, self.each, strict=True)]

    def look(self, grown: Grown, going: list[int], depths: list[int], depth: int) -> None:
        """The drafts that are `going` on have got the tokens of this depth, which may end them."""
        for place, score in zip(going, self.rule.scores(grown), strict=True):
            if self.each[place].stops(score):
                depths[place] = depth

    def keep(self, indices: list[int]) -> None:
        """Only these requests go on."""
        self.each = [self.each[index] for index in indices]
        self.drafted = self.drafted.only(indices)

    def join(self, other: "Lengths") -> None:
        """The requests of `other` go on after these."""
        self.each += other.each
        self.drafted = self.drafted.join(other.drafted)


def check_length(length: DraftLength | None, known: tuple[str, ...], drafter: str) -> None:
    """`InputError` where `length` looks at more than the drafter knows."""
    if length is not None and length.looks_at not in known:
        raise InputError(
            f"drafter.length: {type(length).__name__} looks at the {length.looks_at} of a draft "
            f"model, which {drafter} has none of; choose length=gammatune"
        )


@dataclass(eq=False)
class _Counting(DraftLength, ABC):
    """Rules that follow how many tokens were accepted.

    initial: the length that the first prompt begins with; carry: whether later prompts begin with
    the length that was reached last. A draft that something else cut short (the end of an answer,
    the budget) and that was accepted whole says nothing about the length, and changes nothing.
    """

    stopped = False  # the last draft, by a threshold
    initial: AtLeast1
    carry: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.forget()

    @property
    def carries(self) -> bool:
        return self.carry

    def start(self) -> Self:
        request = super().start()
        request.rule, request.value = self, self.carried if self.carry else self.initial
        return request

    def limit(self) -> int:
        return ceil(self.value)

    def observe(self, drafted: int, accepted: int) -> None:
        if self.stopped or not accepted == drafted < self.limit():
            self.value = self.following(drafted, accepted)
        self.rule.carried = self.value

    def forget(self) -> None:
        self.carried = self.initial

    @abstractmethod
    def following(self, drafted: int, accepted: int) -> float:
        """The length of the next draft."""


class Heuristic(_Counting):
    """transformers' schedule "heuristic": two tokens more after a draft that was accepted whole,
    else one less. It carries its length over from prompt to prompt ("heuristic_transient" does
    not). Source: `GenerationConfig.num_assistant_tokens_schedule`, where the first length is 20."""

    def following(self, drafted: int, accepted: int) -> float:
        return max(1.0, self.value + (2 if accepted == drafted else -1))


@dataclass(eq=False, kw_only=True)
class GammaTune(_Counting):
    """A draft length that follows a moving mean of the accepted tokens (GammaTune, Algorithm 1,
    whose lines are read in the one way in which all act): A accepted tokens, `bonus` more if they
    are as many as the length; then length <- clip((1 - rate) length + rate A, least, most), and its
    ceiling is drafted.

    rate: eta; bonus: delta; threshold: GammaTune+, which ends a draft with a token drawn where the
    draft model's largest probability is below it (and has no bonus then, however right it was);
    None for GammaTune.
    """

    rate: PositiveShare
    bonus: NotNegative
    least: AtLeast1
    most: AtLeast1
    threshold: Inside | None = field()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise InputError("length: needs least <= most")
        self.looks_at = "nothing" if self.threshold is None else "confidence"

    def scores(self, grown: Grown) -> list[float]:
        return grown.logits.float().softmax(-1).amax(-1).tolist()

    def begin(self) -> None:
        self.stopped = False

    def stops(self, score: float) -> bool:
        self.stopped = super().stops(score)
        return self.stopped

    def following(self, drafted: int, accepted: int) -> float:
        reached = accepted + (self.bonus if accepted == self.limit() else 0)
        new = (1 - self.rate) * self.value + self.rate * reached
        return min(self.most, max(self.least, new))


@dataclass(eq=False)
class AssistantThreshold(DraftLength):
    """transformers' `assistant_confidence_threshold`: a draft ends with a token of which the draft
    model itself is less sure than the threshold."""

    looks_at = "confidence"
    threshold: Inside = field()

    def scores(self, grown: Grown) -> list[float]:
        probabilities = grown.logits.float().softmax(-1)
        return probabilities.gather(1, grown.tokens[:, None])[:, 0].tolist()


@dataclass(eq=False)
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
    scale: Positive
    threshold: float = field()
    goal: Share
    step: NotNegative
    memory: Share
    inertia: Share

    def start(self) -> Self:
        request = super().start()
        request.share = self.goal
        return request

    def scores(self, grown: Grown) -> list[float]:
        entropies = shape_of(grown.logits.float().log_softmax(-1))[:, 0].tolist()
        return [1 - (self.scale * entropy) ** 0.5 for entropy in entropies]

    def observe(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self.share = self.memory * self.share + (1 - self.memory) * accepted / drafted
        wanted = self.threshold + (self.step if self.share < self.goal else -self.step)
        self.threshold = self.inertia * self.threshold + (1 - self.inertia) * wanted
