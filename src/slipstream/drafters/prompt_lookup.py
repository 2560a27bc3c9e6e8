"""Training-free drafts from the text so far: prompt lookup, and adaptive n-grams (ANPD).

Both draft a chain and know only the tokens so far. Sources: Saxena 2023, "Prompt lookup decoding";
Ou et al. 2024, "Lossless Acceleration of Large Language Model via Adaptive N-gram Parallel
Decoding".
"""

from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from slipstream.core.drafts import Draft
from slipstream.core.settings import Size
from slipstream.drafters.base import AttachedHost, Drafter, Request, Verified, bytes_of
from slipstream.drafters.draft_length import DraftLength, check_length
from slipstream.drafters.ngrams import Followers, LastPlaces
from slipstream.targets.target import Target


@dataclass(eq=False)
class PromptLookup(Drafter):
    """Continues as the text continued the last time its longest ending occurred.

    max_ngram: longest ending looked for; num_tokens: most tokens of a draft; length: a rule that
    may want fewer, None for none.
    """

    index = LastPlaces
    max_ngram: Size
    num_tokens: Size
    length: DraftLength | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.length, ("nothing", "confidence"), "a drafter of n-grams")
        self.length = self.length or DraftLength()

    def attach(self, target: Target) -> "AttachedLookup":
        return AttachedLookup(target, self)


class AdaptiveNgram(PromptLookup):
    """ANPD: token by token, what has followed the longest known ending most often."""

    index = Followers


@dataclass
class Lookup:
    """Of one request: the n-grams of its text, the length of its drafts, and the last of them, made
    when the text had `start` tokens."""

    index: LastPlaces
    length: DraftLength
    draft: Draft
    start: int = 0


class AttachedLookup(AttachedHost):
    def __init__(self, target: Target, settings: PromptLookup):
        super().__init__(target, settings)
        self.length = settings.length.attach()

    def state(self, request: Request, budget: int) -> Lookup:
        index = self.settings.index(self.settings.max_ngram)
        return Lookup(index, self.length.start(), Draft.chain(request.tokens[-1:]))

    def learn(self, verified: Verified, states: list[Lookup], brought: None) -> None:
        for request, state in zip(verified.requests, states, strict=True):
            drafted, known = len(state.draft) - 1, request.tokens[state.start :]
            right = state.draft.agreement(known)
            if drafted and (right == drafted or right < len(known)):  # else it is not known yet
                state.length.observe(drafted, right)

    def drafted(self, request: Request, state: Lookup, budget: int) -> Draft:
        state.length.begin()
        most = min(self.settings.num_tokens, budget - 1, request.room - 1, state.length.limit())
        state.index.extend(request.tokens)
        state.start = len(request.tokens)
        drafted, sure = state.index.continuation(request.tokens, max(0, most))
        tokens, confidences = [request.tokens[-1], *drafted], accumulate([1.0, *sure], mul)
        state.draft = Draft.chain(tokens, list(confidences))
        ends = (nodes for nodes, each in enumerate(sure, 2) if state.length.stops(each))
        state.draft = state.draft.first(next(ends, len(state.draft)))
        return state.draft

    def memory(self) -> int:
        return bytes_of(state.index for state in self.states)

    def forget(self) -> None:
        self.length.forget()
