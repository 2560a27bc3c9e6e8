"""A pool of guessed n-grams, found by their first token: what Lookahead and SPECTRA draft from."""

from collections.abc import Iterable, Sequence


def riding(most: int, ngram: int, budget: int) -> int:
    """How many sequences of `ngram` - 1 rows ride along in a tree of `budget` nodes: at least a
    third of them, root apart, are left to guesses.

    >>> riding(4, 4, 20), riding(4, 4, 12), riding(4, 4, 4)
    (4, 2, 0)
    """
    return min(most, (budget - 1) * 2 // 3 // (ngram - 1))


class GuessPool:
    """At most `most` continuations of each first token, of up to `ngram` - 1 tokens; the one that
    was added longest ago is forgotten first.

    >>> pool = GuessPool(3, 2)
    >>> for guess in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7]):
    ...     pool.add(guess)
    >>> list(pool.starting_with(1))
    [(6, 7), (2, 3)]
    """

    def __init__(self, ngram: int, most: int):
        self.ngram, self.most = ngram, most
        self.continuations: dict[int, dict[tuple[int, ...], None]] = {}

    def __contains__(self, token: int) -> bool:
        """Whether anything is known to follow `token`."""
        return token in self.continuations

    def add(self, guess: Sequence[int]) -> None:
        """Remember a first token and its continuation as the newest one."""
        first, *rest = guess
        known = self.continuations.setdefault(first, {})
        rest = tuple(rest)
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self.most:
            del known[next(iter(known))]

    def starting_with(self, token: int) -> Iterable[tuple[int, ...]]:
        """What may follow `token`, the newest first."""
        return reversed(self.continuations.get(token, {}))
