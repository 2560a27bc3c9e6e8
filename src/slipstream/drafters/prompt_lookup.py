"""Training-free drafts from the text so far: prompt lookup, and adaptive n-grams (ANPD).

Both draft a chain and know only the tokens so far. Sources: Saxena 2023, "Prompt lookup decoding";
Ou et al. 2024, "Lossless Acceleration of Large Language Model via Adaptive N-gram Parallel
Decoding".
"""

from dataclasses import dataclass, field
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
    """Of one request: the n-grams of its text, the length of its drafts, and those of which it is
    not known yet how much is right, with the number of tokens that the text had."""

    index: LastPlaces
    length: DraftLength
    waiting: list[tuple[int, Draft]] = field(default_factory=list)


class AttachedLookup(AttachedHost):
    def __init__(self, target: Target, settings: PromptLookup):
        super().__init__(target, settings)
        self.length = settings.length.attach()

    def state(self, request: Request, budget: int) -> Lookup:
        index = self.settings.index(self.settings.max_ngram)
        return Lookup(index, self.length.start())

    def learn(self, verified: Verified, states: list[Lookup], brought: None) -> None:
        for request, state in zip(verified.requests, states, strict=True):
            drafts, state.waiting = state.waiting, []
            for start, draft in drafts:
                drafted, known = len(draft) - 1, request.tokens[start:]
                right = draft.agreement(known)
                if right == drafted or right < len(known):
                    state.length.observe(drafted, right)
                else:
                    state.waiting.append((start, draft))

    def drafted(self, request: Request, state: Lookup, budget: int) -> Draft:
        state.length.begin()
        most = min(self.settings.num_tokens, budget - 1, request.room - 1, state.length.limit())
        state.index.extend(request.tokens)
        drafted, sure = state.index.continuation(request.tokens, max(0, most))
        tokens, confidences = [request.tokens[-1], *drafted], accumulate([1.0, *sure], mul)
        draft = Draft.chain(tokens, list(confidences))
        ends = (nodes for nodes, each in enumerate(sure, 2) if state.length.stops(each))
        draft = draft.first(next(ends, len(draft)))
        if len(draft) > 1:
            state.waiting.append((len(request.tokens), draft))
        return draft

    def memory(self) -> int:
        return bytes_of(state.index for state in self.states)
