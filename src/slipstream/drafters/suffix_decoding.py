"""Suffix decoding: what followed the endings of the text before, in it and in earlier answers.

A suffix tree would know how often each run of tokens occurred; here the places where the last
token occurred are looked at, which gives the same counts, costs one number a token to keep and
makes a prompt of any length known at once. Source: Oliaro et al. 2024, "SuffixDecoding: Extreme
Speculative Decoding for Emerging AI Applications".
"""

from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

from slipstream.core.drafts import Draft, grow_by_confidence
from slipstream.core.settings import Amount, Positive, Share, Size
from slipstream.drafters.base import AttachedHost, Drafter, Request, Verified, bytes_of
from slipstream.drafters.ngrams import LOOKED_AT
from slipstream.targets.target import Target

END = -1
"""What stands after each text; no token."""
Places = list[int]
"""Places of the tokens that follow the occurrences of a run of tokens."""


class Texts:
    """Texts of token ids, and where in them each token occurs; the last one may grow.

    >>> texts = Texts([1, 2, 3, 1, 2, 4, 1, 2])
    >>> list(texts.after([1, 2], 8))
    [(2, [2, 5]), (1, [2, 5])]

    After 1, 2 came 3, 4 and nothing yet, each in one place of three:

    >>> draft = texts.best([1, 2], 4, 8, 1.5, 0.1)
    >>> draft.tokens, draft.parents, [round(each, 2) for each in draft.confidences]
    ([2, 3, 4, 1], [-1, 0, 0, 1], [1.0, 0.33, 0.33, 0.33])
    """

    def __init__(self, tokens: Sequence[int] = ()):
        self.tokens = array("q")
        self.places: dict[int, array] = defaultdict(lambda: array("q"))
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The last text goes on."""
        for place, token in enumerate(tokens, len(self.tokens) + 1):
            self.places[token].append(place)
        self.tokens.extend(tokens)

    def after(self, ending: Sequence[int], depth: int) -> Iterator[tuple[int, Places]]:
        """(length, places) of each ending of a text, up to `depth` tokens, that occurs here, the
        longest first: the places after its occurrences. (The end of these texts is no place.)"""
        tokens, found = self.tokens, []
        places = list(self.places.get(ending[-1], ())[-LOOKED_AT:])
        if places and places[-1] == len(tokens):
            places.pop()
        for size in range(1, 1 + min(depth, len(ending))):
            token = ending[-size]
            places = [place for place in places if place >= size and tokens[place - size] == token]
            if not places:
                break
            found.append((size, places))
        yield from reversed(found)

    def best(
        self,
        text: Sequence[int],
        budget: int,
        depth: int,
        factor: float,
        least: float,
        width: int = 64,
    ) -> Draft:
        """Of the trees of up to `budget` nodes that each ending of `text` leads to, the one that
        should have most tokens right. For the others see `SuffixDecoding`; width: most children of
        a node."""
        best, known = Draft([text[-1]], [-1]), 0
        # the text itself ends with what has occurred, too: one more place, with nothing after it
        ends = self.tokens[-1:] == array("q", text[-1:])
        for size, places in self.after(text, depth):
            most = min(budget - 1, int(factor * size))
            if most <= sum(best.confidences[1:]):
                break  # nor can shorter endings do better
            if len(places) > known:  # not the same ones as after a longer ending
                known = len(places)
                draft = self._grown(text[-1], places, ends, 1 + most, width)
                draft = draft.first(sum(own >= least for own in draft.confidences))
                best = max(best, draft, key=lambda each: sum(each.confidences))
        return best

    def _grown(self, root: int, places: Places, ends: bool, budget: int, width: int) -> Draft:
        """The most probable continuations at `places`; ends: whether one more has none."""

        def children(node: tuple[int, Places], depth: int):
            following: dict[int, Places] = defaultdict(list)
            for place in node[1]:
                if place < len(self.tokens) and self.tokens[place] != END:
                    following[self.tokens[place]].append(place + 1)
            best = nlargest(width, following.items(), key=lambda item: len(item[1]))
            count = len(node[1]) + (ends and depth == 1)
            return best, [len(own) / count for _, own in best]

        draft = grow_by_confidence((root, places), children, budget, budget)
        return Draft([token for token, _ in draft.tokens], draft.parents, draft.confidences)


@dataclass(eq=False)
class SuffixDecoding(Drafter):
    """The most probable continuations of the longest endings of the text, as a tree.

    depth: longest ending looked for; factor: most tokens of a draft, as a multiple of the ending's
    length; least: least probable node that is drafted; kept: tokens of earlier answers that are
    looked through, too, the latest ones; 0 for none.
    """

    depth: Size
    factor: Positive
    least: Share
    kept: Amount

    def attach(self, target: Target) -> "AttachedSuffixes":
        return AttachedSuffixes(target, self)


State = tuple[int, Texts]
"""Of one request: where its answer begins, and its text so far."""


class AttachedSuffixes(AttachedHost):
    """Answers are kept in two halves: when the newer one is full, the older one is forgotten."""

    def __init__(self, target: Target, settings: SuffixDecoding):
        super().__init__(target, settings)
        self.keeps = settings.kept > 0
        self.forget()

    def forget(self) -> None:
        self.kept: deque[Texts] = deque([Texts()], maxlen=2)

    def state(self, request: Request, budget: int) -> State:
        return len(request.tokens), Texts()

    def learn(self, verified: Verified, states: list[State], brought: None) -> None:
        for request, (start, texts) in zip(verified.requests, states, strict=True):
            texts.extend(request.tokens[len(texts) :])
            if self.keeps and request.room == 0:
                if len(self.kept[-1]) >= self.settings.kept / 2:
                    self.kept.append(Texts())
                self.kept[-1].extend([*request.tokens[start:], END])

    def drafted(self, request: Request, state: State, budget: int) -> Draft:
        own = self.settings
        given = request.tokens, min(budget, request.room), own.depth, own.factor, own.least
        found = [texts.best(*given) for texts in (state[1], *self.kept)]
        return max(found, key=lambda draft: sum(draft.confidences))

    def memory(self) -> int:
        return bytes_of([*self.kept, *(texts for _, texts in self.states)])
