"""Training-free drafts from the text so far: prompt lookup, and adaptive n-grams (ANPD).

Both draft a chain and know only the tokens so far. Sources: Saxena 2023, "Prompt lookup decoding";
Ou et al. 2024, "Lossless Acceleration of Large Language Model via Adaptive N-gram Parallel
Decoding".
"""

from itertools import accumulate
from operator import mul

from slipstream.core.errors import InputError
from slipstream.core.tree import DraftTree
from slipstream.drafters.base import Context, Drafter, Step
from slipstream.drafters.draft_length import DraftLength, Drawn, check_length
from slipstream.drafters.memory import bytes_of
from slipstream.drafters.ngrams import Followers, LastPlaces
from slipstream.targets.target import Target


class PromptLookup(Drafter):
    """Continues as the text continued the last time its longest ending occurred.

    max_ngram: longest ending looked for; num_tokens: most tokens of a draft; length: a rule that
    may want fewer, None for none.
    """

    index = LastPlaces

    def __init__(self, max_ngram: int, num_tokens: int, length: DraftLength | None = None):
        if max_ngram < 1 or num_tokens < 1:
            raise InputError("drafter.max_ngram, drafter.num_tokens: must be at least 1")
        self.max_ngram, self.num_tokens = max_ngram, num_tokens
        self.length = length or DraftLength()
        self.drafted: list[DraftTree] | None = None
        self.indexes: list[LastPlaces | Followers] = []

    def bind(self, target: Target) -> Target:
        check_length(self.length, ("nothing", "confidence"), "a drafter of n-grams")
        return target

    def begin(self, contexts: list[Context], budget: int) -> None:
        self.length.begin(len(contexts))
        self.drafted = None
        for context in contexts:
            context.state = self.index(self.max_ngram)
        self.indexes = [context.state for context in contexts]

    @property
    def store_bytes(self) -> int:
        return bytes_of(index.store for index in self.indexes)

    def forget(self) -> None:
        self.length.forget()

    def leave(self, kept: list[int]) -> None:
        self.length.leave(kept)

    def observe(self, context: Context, step: Step) -> None:
        if self.drafted is not None and len(own := self.drafted[step.sequence]) > 1:
            self.length.observe(step.sequence, len(own) - 1, own.agreement(step.answer))

    def propose(self, contexts: list[Context], budget: int) -> list[DraftTree]:
        self.length.start()
        with contexts[0].clock.share("draft"):
            trees = []
            for place, context in enumerate(contexts):
                most = min(self.num_tokens, budget - 1, context.max_depth)
                length = max(0, min(most, self.length.limit(place)))
                context.state.extend(context.tokens)
                drafted, sure = context.state.continuation(context.tokens, length)
                length = self._wanted(place, drafted, sure)
                tree = DraftTree.chain([context.tokens[-1], *drafted[:length]])
                tree.confidences = list(accumulate([1.0, *sure[:length]], mul))
                trees.append(tree)
        self.drafted = trees
        return trees

    def _wanted(self, place: int, drafted: list[int], sure: list[float]) -> int:
        """How many of the drafted tokens the rule lets through, the one at which it stops last."""
        if self.length.looks_at == "nothing":
            return len(drafted)
        for count, (token, confidence) in enumerate(zip(drafted, sure, strict=True), start=1):
            if self.length.stops(Drawn([place], None, [token], sure=[confidence]))[0]:
                return count
        return len(drafted)


class AdaptiveNgram(PromptLookup):
    """ANPD: token by token, what has followed the longest known ending most often."""

    index = Followers
