"""Lookahead decoding: the target guesses n-grams by Jacobi iteration while it verifies others.

A window of guessed tokens, `ngram` - 1 generations of them, takes part in every verifying forward:
what the target predicts after the youngest generation is the next one, and a column through the
generations is an n-gram for the pool. The window is a comb: the oldest generation is a chain from
the root, and the younger tokens of a column hang from its oldest one. Source: Fu et al. 2024,
"Break the Sequential Dependency of LLM Inference Using Lookahead Decoding".
"""

from collections.abc import Sequence

from slipstream.drafters.guesses import Branches, Guessing, GuessPool
from slipstream.drafters.suffixes import Retrieval


class Lookahead(Guessing):
    """window: most columns (W); ngram: tokens of an n-gram (N); guesses: n-grams verified at once,
    and kept of each first token (G); text, retrieval, keep: as in `Guessing`."""

    def __init__(
        self,
        window: int,
        ngram: int,
        guesses: int,
        text: bool,
        retrieval: Retrieval | None,
        keep: bool,
    ):
        super().__init__(window, ngram, guesses, text, retrieval, keep)

    def stored(self) -> "_Pool":
        return _Pool(self.ngram, self.most)

    def branches(self, prompt: list[int], count: int, stored: "_Pool") -> "_Window":
        return _Window(prompt, count, self.ngram, stored)

    def guesses(self, tokens: list[int], stored: "_Pool", room: int) -> list[Sequence[int]]:
        return list(stored.starting_with(tokens[-1]))


class _Pool(GuessPool):
    """A pool as what is stored."""

    @property
    def parts(self) -> list[object]:
        return [self.continuations]


class _Window(Branches):
    """Generations of guessed tokens of one request, the oldest first, and the pool they feed."""

    def __init__(self, prompt: list[int], width: int, ngram: int, stored: _Pool):
        super().__init__(stored)
        self.width, self.ngram = width, ngram
        self.generations = [self.drawn(prompt, width)]

    def paths(self) -> list[list[int]]:
        """From the root to the youngest token of each column: the oldest generation up to it, then
        the column."""
        oldest, *younger = self.generations
        return [
            [*oldest[: place + 1], *(generation[place] for generation in younger)]
            for place in range(self.width)
        ]

    def extend(self, ranked: list[list[int]]) -> None:
        self.generations.append([likeliest for likeliest, *_ in ranked])
        if len(self.generations) == self.ngram:
            for column in zip(*self.generations, strict=True):
                self.stored.add(column)
            del self.generations[0]
