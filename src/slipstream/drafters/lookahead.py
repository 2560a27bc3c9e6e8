"""Lookahead decoding: the target guesses n-grams by Jacobi iteration while it verifies others.

A window of guessed tokens, `ngram` - 1 generations of them, takes part in every verifying forward:
what the target predicts after the youngest generation is the next one, and a column through the
generations is an n-gram for the pool. The window is a comb: the oldest generation is a chain from
the root, and the younger tokens of a column hang from its oldest one. Source: Fu et al. 2024,
"Break the Sequential Dependency of LLM Inference Using Lookahead Decoding".
"""

from dataclasses import dataclass

from slipstream.core.settings import Size
from slipstream.drafters.guesses import Branches, Guessing, GuessPool, num_branches


@dataclass(eq=False, kw_only=True)
class Lookahead(Guessing):
    """window: most columns (W); for the others see `Guessing`."""

    window: Size

    def branches(self, prompt: list[int], budget: int, stored: GuessPool) -> "_Window":
        return _Window(prompt, num_branches(self.window, self.ngram, budget), stored)


class _Window(Branches):
    """Generations of guessed tokens of one request, the oldest first, and the pool they feed."""

    def __init__(self, prompt: list[int], width: int, stored: GuessPool):
        super().__init__(stored)
        self.width = width
        self.generations = [self.drawn(prompt, width)]

    def paths(self) -> list[list[int]]:
        """Of each column: the oldest generation up to it, then the column to its youngest token."""
        oldest, *younger = self.generations
        return [
            [*oldest[: place + 1], *(generation[place] for generation in younger)]
            for place in range(self.width)
        ]

    def extend(self, said: list[list[int]]) -> None:
        self.generations.append([likeliest for (likeliest,) in said])
        if len(self.generations) == self.stored.ngram:
            for column in zip(*self.generations, strict=True):
                self.stored.add(column)
            del self.generations[0]
