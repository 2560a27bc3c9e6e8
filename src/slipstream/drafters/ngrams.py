"""Where n-grams of a growing text occurred: what prompt lookup and adaptive n-grams draft from.

A text is indexed as it grows, so that a step never goes through the whole of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence

Continuation = tuple[list[int], list[float]]
"""Tokens, and how sure each is, given those before it."""


def longest_known(store: Container, tokens: Sequence[int], longest: int) -> tuple[int, ...] | None:
    """The longest ending of a text, up to `longest` tokens, that is in the store; None for none."""
    sizes = range(min(longest, len(tokens)), 0, -1)
    endings = (tuple(tokens[-size:]) for size in sizes)
    return next((ending for ending in endings if ending in store), None)


class _Ngrams(ABC):
    """The n-grams of up to `longest` tokens of one text that have a follower."""

    def __init__(self, longest: int):
        self.longest, self.indexed = longest, 0
        self.store: dict[tuple[int, ...], int | dict[int, int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Index what `tokens`, the text so far, has beyond what was indexed before."""
        for place in range(max(1, self.indexed), len(tokens)):
            for size in range(1, min(self.longest, place) + 1):
                self._note(tuple(tokens[place - size : place]), place, tokens[place])
        self.indexed = len(tokens)

    @abstractmethod
    def _note(self, ngram: tuple[int, ...], place: int, token: int) -> None:
        """`token` follows the n-gram, at `place` of the text."""


class LastPlaces(_Ngrams):
    """Where each n-gram was last followed by something.

    >>> index, text = LastPlaces(3), [1, 2, 3, 9, 1, 2]
    >>> index.extend(text)
    >>> index.continuation(text, 2)[0]
    [3, 9]
    """

    def _note(self, ngram: tuple[int, ...], place: int, token: int) -> None:
        self.store[ngram] = place

    def continuation(self, tokens: list[int], length: int) -> Continuation:
        """Up to `length` tokens that followed the last earlier occurrence of the longest suffix.

        The longer the match, the surer: n tokens that agree make the next one n / (n + 1) sure.
        """
        ngram = longest_known(self.store, tokens, self.longest)
        if ngram is None:
            return [], []
        place, size = self.store[ngram], len(ngram)
        found = tokens[place : place + length]
        return found, [known / (known + 1) for known in range(size, size + len(found))]


class Followers(_Ngrams):
    """How often each token followed each n-gram.

    >>> index = Followers(2)
    >>> index.extend([1, 2, 1, 3, 1, 2])
    >>> index.continuation([9, 1], 2)
    ([2, 1], [0.6666666667, 1.0])
    """

    def _note(self, ngram: tuple[int, ...], place: int, token: int) -> None:
        counts = self.store.setdefault(ngram, {})
        counts[token] = counts.pop(token, 0) + 1  # the last follower stands last

    def continuation(self, tokens: Sequence[int], length: int) -> Continuation:
        """Token by token, up to `length` times, what followed the longest known suffix most often,
        the last such token of several; as sure as its share of what followed."""
        ending, drafted, shares = list(tokens[-self.longest :]), [], []
        while len(drafted) < length:
            ngram = longest_known(self.store, ending, self.longest)
            if ngram is None:
                break
            counts = self.store[ngram]
            drafted.append(max(reversed(counts), key=counts.__getitem__))
            shares.append(counts[drafted[-1]] / sum(counts.values()))
            ending = [*ending, drafted[-1]][-self.longest :]
        return drafted, shares
