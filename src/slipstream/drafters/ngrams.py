"""Where n-grams of a growing text occurred: what prompt lookup and adaptive n-grams draft from.

A text is indexed as it grows, so that a step never goes through the whole of it.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence

LOOKED_AT = 1024
"""Most places where something occurred that are looked at, the latest ones."""
UNSEEN = 2.0
"""What has not followed yet counts as two occurrences of one token's n-gram; one of n tokens counts
n * n times as much. (Measured on validation prompts.)"""
Continuation = tuple[list[int], list[float]]
"""Tokens, and how sure each is, given those before it."""


def longest_known(store: Container, tokens: Sequence[int], longest: int) -> tuple[int, ...] | None:
    """The longest ending of a text, up to `longest` tokens, that is in the store; None for none."""
    sizes = range(min(longest, len(tokens)), 0, -1)
    endings = (tuple(tokens[-size:]) for size in sizes)
    return next((ending for ending in endings if ending in store), None)


class LastPlaces:
    """Where each n-gram of up to `longest` tokens of one text was last followed by something.

    >>> index, text = LastPlaces(3), [1, 2, 3, 9, 1, 2]
    >>> index.extend(text)
    >>> index.continuation(text, 2)[0]
    [3, 9]
    """

    def __init__(self, longest: int):
        self.longest, self.indexed = longest, 0
        self.places: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Index what `tokens`, the text so far, has beyond what was indexed before."""
        for size in range(1, self.longest + 1):
            places = range(max(size, self.indexed), len(tokens))
            columns = (tokens[places.start - back : -1] for back in range(size, 0, -1))
            self._note(zip(*columns, strict=False), places, size)
        self.indexed = max(self.indexed, len(tokens))

    def _note(self, ngrams: Iterable[tuple[int, ...]], places: range, size: int) -> None:
        """N-grams of `size` tokens, and the places of what follows each."""
        self.places.update(zip(ngrams, places, strict=False))

    def continuation(self, tokens: Sequence[int], length: int) -> Continuation:
        """Up to `length` tokens that followed the last earlier occurrence of the longest suffix.

        The longer the match, the surer: n tokens that agree make the next one n / (n + 1) sure.
        """
        ngram = longest_known(self.places, tokens, self.longest)
        if ngram is None:
            return [], []
        place, size = self.places[ngram], len(ngram)
        found = tokens[place : place + length]
        return found, [known / (known + 1) for known in range(size, size + len(found))]


class Followers(LastPlaces):
    """How often each token followed each n-gram. before[n][place]: where the token stands that
    followed the previous occurrence of the n tokens before `place`, or None.

    >>> index, text = Followers(2), [1, 2, 1, 3, 1, 2]
    >>> index.extend(text)
    >>> index.continuation([*text, 9, 1], 2)
    ([2, 1], [0.4, 0.6666666667])
    """

    def __init__(self, longest: int):
        super().__init__(longest)
        self.before: list[list[int | None]] = [[None] * size for size in range(longest + 1)]

    def _note(self, ngrams: Iterable[tuple[int, ...]], places: range, size: int) -> None:
        known, note, earlier = self.places, self.before[size].append, self.places.get
        for ngram, place in zip(ngrams, places, strict=False):
            note(earlier(ngram))
            known[ngram] = place

    def continuation(self, tokens: Sequence[int], length: int) -> Continuation:
        """Token by token, up to `length` times, what followed the longest known suffix most often,
        the last such token of several; as sure as its share of what followed, and of `UNSEEN`."""
        ending, sure = list(tokens[-self.longest :]), []
        known = len(ending)
        while len(sure) < length and (ngram := longest_known(self.places, ending, self.longest)):
            followers, place = [], self.places[ngram]  # the last place first
            while place is not None and len(followers) < LOOKED_AT:
                followers.append(tokens[place])
                place = self.before[len(ngram)][place]
            counts = Counter(followers) if len(followers) > 1 else {followers[0]: 1}
            likeliest = max(counts, key=counts.__getitem__)  # the last follower stands first
            ending.append(likeliest)
            sure.append(counts[likeliest] / (len(followers) + UNSEEN / len(ngram) ** 2))
        return ending[known:], sure
