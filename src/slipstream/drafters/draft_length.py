"""When a draft is long enough: rules that say how far to draft, or look at every token drawn.

A rule holds settings; each request has a `Length` of its own that follows it. Any such rule leaves
decoding exact: whether one more token is drafted depends only on tokens that are part of the draft
already, and verification goes level by level. Where drafts are drawn (a draft model, sampling), a
length that is carried from prompt to prompt makes an answer's tokens depend on earlier prompts,
though not their distribution.
"""

import copy
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil, inf

import torch

from slipstream.core.errors import InputError
from slipstream.speculators.draft_features import shape_of
from slipstream.targets.target import Target


@dataclass(frozen=True)
class Drawn:
    """P drafts of a batch that have just grown by a token each.

    logits: (P, V) that the tokens were drawn from, before temperature, top-k and top-p; tokens:
    (P,), or the likeliest ones where a level of a tree has several; hidden: (P, D) the draft
    model's states before the final norm, None for other drafters.
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    hidden: torch.Tensor | None = None

    def confidences(self) -> torch.Tensor:
        """(P,) how probable the drafter thinks each token."""
        return self.logits.float().softmax(-1).gather(1, self.tokens[:, None])[:, 0]


class Length:
    """The draft length of one request, and the simplest rule: as long as there is room."""

    def begin(self) -> None:
        """Another draft begins."""

    def limit(self) -> int:
        """Most tokens of that draft."""
        return sys.maxsize

    def stops(self, score: float) -> bool:
        """Whether the draft ends with the token of which the rule finds this score."""
        return False

    def observe(self, drafted: int, accepted: int) -> None:
        """What became of the draft."""


class DraftLength:
    """Base of all rules.

    looks_at: what `scores` needs to know of a draft: "nothing", the "confidence" in its tokens, the
    "logits" that they are drawn from, or the "states" of a draft model as well.
    """

    looks_at = "nothing"

    def attach(self, model: Target | None = None) -> "DraftLength":
        """This rule for a drafter at work, with its draft model if it has one; what it carries from
        prompt to prompt is its own."""
        return copy.copy(self)

    def start(self) -> Length:
        """The length of a new request."""
        return Length()

    def scores(self, drawn: Drawn) -> list[float]:
        """(P,) what the rule finds of each token drawn, for `Length.stops`."""
        return [0.0] * len(drawn.tokens)

    def forget(self) -> None:
        """Forget what earlier prompts taught."""


def check_length(
    length: DraftLength | None, known: tuple[str, ...], drafter: str
) -> DraftLength | None:
    """`length`, unless it looks at more than the drafter knows (InputError)."""
    if length is not None and length.looks_at not in known:
        raise InputError(
            f"drafter.length: {type(length).__name__} looks at the {length.looks_at} of a draft "
            f"model, which {drafter} has none of; choose +length@drafter.length=gammatune"
        )
    return length


class _Counted(Length):
    """A length that follows how many tokens were accepted."""

    def __init__(self, rule: "_Counting"):
        self.rule, self.stopped = rule, False
        self.value: float = rule.carried if rule.carry else rule.initial

    def begin(self) -> None:
        self.stopped = False

    def limit(self) -> int:
        return ceil(self.value)

    def stops(self, score: float) -> bool:
        self.stopped = self.rule.too_unsure(score)
        return self.stopped

    def observe(self, drafted: int, accepted: int) -> None:
        self.value = self.rule.following(self, drafted, accepted)
        self.rule.carried = self.value


class _Counting(DraftLength, ABC):
    """Rules that follow how many tokens were accepted.

    initial: the length that the first prompt begins with; carry: whether later prompts begin with
    the length that was reached last.
    """

    def __init__(self, initial: float, carry: bool):
        if not 1 <= initial < inf:
            raise InputError("length.initial: must be a finite number of at least 1")
        self.initial, self.carry = initial, carry
        self.forget()

    def start(self) -> Length:
        return _Counted(self)

    def forget(self) -> None:
        self.carried = self.initial

    def too_unsure(self, score: float) -> bool:
        """Whether a draft ends with a token of this score."""
        return False

    @abstractmethod
    def following(self, length: _Counted, drafted: int, accepted: int) -> float:
        """The length of the next draft."""


class Heuristic(_Counting):
    """transformers' schedule "heuristic": two tokens more after a draft that was accepted whole,
    else one less. It carries its length over from prompt to prompt ("heuristic_transient" does
    not). Source: `GenerationConfig.num_assistant_tokens_schedule`, where the first length is 20."""

    def following(self, length: _Counted, drafted: int, accepted: int) -> float:
        if drafted < length.limit() and accepted == drafted:
            return length.value
        return max(1.0, length.value + (2 if accepted == drafted else -1))


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

    def scores(self, drawn: Drawn) -> list[float]:
        if self.threshold is None:
            return super().scores(drawn)
        return drawn.logits.float().softmax(-1).amax(-1).tolist()

    def too_unsure(self, score: float) -> bool:
        return self.threshold is not None and score < self.threshold

    def following(self, length: _Counted, drafted: int, accepted: int) -> float:
        limit = length.limit()
        if accepted == drafted < limit and not length.stopped:
            return length.value
        reached = accepted + (self.bonus if accepted == limit else 0)
        new = (1 - self.rate) * length.value + self.rate * reached
        return min(self.most, max(self.least, new))


class Below(Length):
    """A draft ends with a token whose score is below the threshold."""

    def __init__(self, threshold: float):
        self.threshold = threshold

    def stops(self, score: float) -> bool:
        return score < self.threshold


class AssistantThreshold(DraftLength):
    """transformers' `assistant_confidence_threshold`: a draft ends with a token of which the draft
    model itself is less sure than the threshold."""

    looks_at = "confidence"

    def __init__(self, threshold: float):
        if not 0 < threshold < 1:
            raise InputError("length.threshold: must be between 0 and 1, both excluded")
        self.threshold = threshold

    def start(self) -> Length:
        return Below(self.threshold)

    def scores(self, drawn: Drawn) -> list[float]:
        return drawn.confidences().tolist()


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

    def start(self) -> Length:
        return _Bounded(self)

    def scores(self, drawn: Drawn) -> list[float]:
        entropies = shape_of(drawn.logits)[:, 0].tolist()
        return [1 - (self.scale * entropy) ** 0.5 for entropy in entropies]


class _Bounded(Below):
    """AdaEDL's threshold of one request, and the share of tokens that were accepted."""

    def __init__(self, rule: EntropyBound):
        super().__init__(rule.threshold)
        self.rule, self.share = rule, rule.goal

    def observe(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        rule = self.rule
        self.share = rule.memory * self.share + (1 - rule.memory) * accepted / drafted
        wanted = self.threshold + (rule.step if self.share < rule.goal else -rule.step)
        self.threshold = rule.inertia * self.threshold + (1 - rule.inertia) * wanted
