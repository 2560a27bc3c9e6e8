"""Lookahead decoding: the target guesses n-grams by Jacobi iteration while it verifies others.

A window of guessed tokens, `ngram - 1` generations of them, takes part in every verifying forward:
what the target predicts after the youngest generation is the next one, and a column through the
generations is an n-gram for the pool. The window is a comb of branches of the draft tree, so that
its rows see what they should, and are verified, too. Source: Fu et al. 2024, "Break the Sequential
Dependency of LLM Inference Using Lookahead Decoding".
"""

import random

import torch

from slipstream.core.errors import InputError
from slipstream.core.growth import PathTree
from slipstream.core.tree import DraftTree
from slipstream.drafters.base import Context, Drafter, Outlook, Step
from slipstream.drafters.guesses import GuessPool, riding
from slipstream.drafters.memory import bytes_of
from slipstream.drafters.suffixes import Retrieval
from slipstream.targets.target import Target


class Lookahead(Drafter):
    """window: most columns (W); ngram: tokens of an n-gram (N); guesses: n-grams verified at once,
    and kept of each first token (G). text: whether the n-grams of prompt and answer are in the
    pool, too. retrieval: guesses from a corpus, after the others, None for none. keep: whether
    later prompts find what earlier ones stored.
    """

    mergeable = False

    def __init__(
        self,
        window: int,
        ngram: int,
        guesses: int,
        text: bool,
        retrieval: Retrieval | None,
        keep: bool,
    ):
        if window < 1 or ngram < 2 or guesses < 1:
            raise InputError(
                "drafter: needs window and guesses of at least 1, and ngram of at least 2"
            )
        self.window, self.ngram, self.guesses = window, ngram, guesses
        self.text, self.retrieval, self.keep = text, retrieval, keep
        self.kept: GuessPool | None = None
        self.windows: list[_Window] = []

    def bind(self, target: Target) -> Target:
        if self.retrieval is not None:
            self.retrieval.bind(target)
        return target

    def begin(self, contexts: list[Context], budget: int) -> None:
        width = riding(self.window, self.ngram, budget)
        for context in contexts:
            pool = GuessPool(self.ngram, self.guesses)
            if self.keep:
                pool = self.kept = self.kept or pool
            context.state = _Window(context.tokens, width, pool)
        self.windows = [context.state for context in contexts]

    @property
    def store_bytes(self) -> int:
        return bytes_of(window.pool.continuations for window in self.windows)

    def propose(self, contexts: list[Context], budget: int) -> list[DraftTree]:
        with contexts[0].clock.share("draft"):
            return [self._guessed(context, budget) for context in contexts]

    def _guessed(self, context: Context, budget: int) -> DraftTree:
        window: _Window = context.state
        if self.text:
            window.read(context.tokens)
        paths = PathTree(context.tokens[-1], budget - window.width * (self.ngram - 1))
        guesses = list(window.pool.starting_with(context.tokens[-1]))
        if self.retrieval is not None:
            guesses += self.retrieval.continuations(context.tokens)
        for guess in guesses[: self.guesses]:
            paths.add(guess[: context.max_depth])
        paths.budget = budget
        window.ends = [paths.add(path) for path in window.paths()]
        return paths.tree()

    def foresee(self, contexts: list[Context], outlook: Outlook) -> tuple[torch.Tensor, ...]:
        """(B, N) what the target would say after each node."""
        return () if outlook.logits is None else (outlook.logits.argmax(-1),)

    def observe(self, context: Context, step: Step) -> None:
        if step.foreseen:
            with context.clock.share("draft"):
                choices = step.foreseen[0].tolist()
                window: _Window = context.state
                window.advance([choices[end] for end in window.ends], self.ngram)


class _Window:
    """Generations of guessed tokens of one prompt, the oldest first, and the pool they feed."""

    def __init__(self, prompt: list[int], width: int, pool: GuessPool):
        chance = random.Random(0)
        self.generations = [[chance.choice(prompt) for _ in range(width)]]
        self.width, self.pool, self.read_to = width, pool, 0
        self.ends: list[int] = []

    def paths(self) -> list[list[int]]:
        """From the root to the youngest token of each column: the oldest generation up to it, then
        the column."""
        oldest, *younger = self.generations
        return [
            [*oldest[: place + 1], *(generation[place] for generation in younger)]
            for place in range(len(oldest))
        ]

    def advance(self, youngest: list[int], ngram: int) -> None:
        self.generations.append(youngest)
        if len(self.generations) == ngram:
            for column in zip(*self.generations, strict=True):
                self.pool.add(column)
            del self.generations[0]

    def read(self, tokens: list[int]) -> None:
        """Put the n-grams of the text into the pool that have come to it."""
        size = self.pool.ngram
        for start in range(self.read_to, len(tokens) - size + 1):
            self.pool.add(tokens[start : start + size])
        self.read_to = max(self.read_to, len(tokens) - size + 1)
