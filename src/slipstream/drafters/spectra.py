"""SPECTRA: candidate sequences that the target extends while it verifies feed two dictionaries.

Candidates of `ngram` tokens become one token longer in every verifying forward, and one shorter at
the front. All their sub-n-grams go into a forward dictionary (token -> what followed) and a
backward dictionary (n-gram -> next token), which the guesses come from. Source: SPECTRA,
Algorithm 1, lines 7 to 17 of which are the order `forward_first`.
"""

from collections.abc import Sequence

from slipstream.core.errors import InputError
from slipstream.drafters.guesses import Branches, Guessing, GuessPool
from slipstream.drafters.suffixes import Retrieval

ORDERS = ("backward_first", "forward_first")
"""Of guesses. The second is the paper's, where the chain falls off if there are many others."""


class Spectra(Guessing):
    """candidates: most of them (W); ngram: N; guesses: most sequences verified at once, and kept of
    each first token (G). unseen_probability: how often a candidate is extended by the likeliest
    token that is no key of the forward dictionary (the paper's 1 - tau), sought among `ranks`.
    forward, backward: which dictionaries guesses come from; order: which of them finds room first,
    one of `ORDERS`. chain: most tokens of the backward dictionary's one guess; backward_share: most
    of the nodes for guesses that it may take, as a part of them. sub_ngrams: whether parts of
    candidates are stored, or whole ones alone. text, retrieval, keep: as in `Guessing`.
    """

    ranks = 32

    def __init__(
        self,
        candidates: int,
        ngram: int,
        guesses: int,
        unseen_probability: float,
        forward: bool,
        backward: bool,
        order: str,
        chain: int,
        backward_share: float,
        sub_ngrams: bool,
        text: bool,
        retrieval: Retrieval | None,
        keep: bool,
    ):
        super().__init__(candidates, ngram, guesses, text, retrieval, keep)
        if not 0 <= unseen_probability <= 1:
            raise InputError("drafter.unseen_probability: must be between 0 and 1")
        if order not in ORDERS:
            raise InputError(f"drafter.order: must be one of {', '.join(ORDERS)}")
        if chain < 1:
            raise InputError("drafter.chain: must be at least 1")
        if not 0 < backward_share <= 1:
            raise InputError(
                "drafter.backward_share: must be above 0 and at most 1; drafter.backward=false "
                "leaves the backward dictionary out"
            )
        self.unseen_probability = unseen_probability
        self.order, self.chain, self.backward_share = order, chain, backward_share
        self.forward, self.backward, self.sub_ngrams = forward, backward, sub_ngrams

    def stored(self) -> "Dictionaries":
        return Dictionaries(self.ngram, self.most, self.sub_ngrams)

    def branches(self, prompt: list[int], count: int, stored: "Dictionaries") -> "_Candidates":
        return _Candidates(prompt, count, stored, self.unseen_probability)

    def guesses(self, tokens: list[int], stored: "Dictionaries", room: int) -> list[Sequence[int]]:
        """The backward dictionary's chain, which matches most tokens, and what the forward one has,
        in `order`."""
        longest = min(self.chain, max(1, int(self.backward_share * room)))
        chain = stored.chain(tokens, longest) if self.backward else []
        backward = [chain] if chain else []
        forward = list(stored.forward.starting_with(tokens[-1])) if self.forward else []
        return backward + forward if self.order == "backward_first" else forward + backward


class Dictionaries:
    """forward: token -> sequences; backward: n-gram -> next token."""

    def __init__(self, ngram: int, most: int, sub_ngrams: bool):
        self.ngram, self.sub_ngrams = ngram, sub_ngrams
        self.forward = GuessPool(ngram, most)
        self.backward: dict[tuple[int, ...], int] = {}

    @property
    def parts(self) -> list[object]:
        return [self.forward.continuations, self.backward]

    def add(self, ngram: Sequence[int]) -> None:
        *before, last = ngram
        for start in range(len(before) if self.sub_ngrams else 1):
            self.forward.add(ngram[start:])
            self.backward[tuple(before[start:])] = last

    def chain(self, tokens: list[int], longest: int) -> list[int]:
        """Up to `longest` tokens, one by one what the backward dictionary has for the longest
        suffix it knows."""
        ending, found = tokens[-self.ngram + 1 :], []
        while len(found) < longest:
            suffixes = (tuple(ending[start:]) for start in range(len(ending)))
            token = next((self.backward[each] for each in suffixes if each in self.backward), None)
            if token is None:
                break
            found.append(token)
            ending = [*ending, token][-self.ngram + 1 :]
        return found


class _Candidates(Branches):
    """Sequences of `ngram` tokens. The first token of each has left the forward."""

    def __init__(
        self, prompt: list[int], count: int, stored: Dictionaries, unseen_probability: float
    ):
        super().__init__(stored)
        self.unseen_probability = unseen_probability
        self.sequences = [self.drawn(prompt, stored.ngram) for _ in range(count)]

    def paths(self) -> list[list[int]]:
        return [sequence[1:] for sequence in self.sequences]

    def extend(self, ranked: list[list[int]]) -> None:
        for place, likely in enumerate(ranked):
            self.sequences[place] = [*self.sequences[place][1:], self._extension(likely)]
            self.stored.add(self.sequences[place])

    def _extension(self, likely: list[int]) -> int:
        if self.chance.random() < self.unseen_probability:
            return next((each for each in likely if each not in self.stored.forward), likely[0])
        return likely[0]
