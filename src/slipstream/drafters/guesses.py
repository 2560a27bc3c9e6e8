"""What Lookahead and SPECTRA share: branches that the target extends while it verifies others.

These lookahead branches of the draft tree grow by one token a step, whether they are accepted or
not; what they become is stored and guessed later. As branches they see what they should; with
`accept_branches` their tokens are drafts like others.
"""

import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from slipstream.core.drafts import Draft, PathTree
from slipstream.core.settings import Ge, Le, Size
from slipstream.core.transfer import on_device
from slipstream.drafters.base import AttachedHost, Brought, Drafter, Request, Verified, bytes_of
from slipstream.drafters.suffixes import Retrieval
from slipstream.targets.target import Target


class GuessPool:
    """At most `most` continuations of each first token, of up to `ngram` - 1 tokens; the one that
    was added longest ago is forgotten first. A prefix of another continuation has no entry: adding
    it changes nothing, and adding the longer one removes it.

    >>> pool = GuessPool(3, 2)
    >>> for guess in ([1, 2], [1, 2, 3], [1, 4, 5], [1, 2], [1, 6, 7]):
    ...     pool.add(guess)
    >>> list(pool.starting_with(1))
    [(6, 7), (4, 5)]
    """

    def __init__(self, ngram: int, most: int):
        self.ngram, self.most = ngram, most
        self.continuations: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, guess: Sequence[int]) -> None:
        """Remember a first token and its continuation as the newest one of that token."""
        first, *rest = guess
        known, new = self.continuations.setdefault(first, {}), tuple(rest)
        if any(len(other) > len(new) and other[: len(new)] == new for other in known):
            return
        for other in [each for each in known if new[: len(each)] == each]:
            del known[other]
        known[new] = None
        if len(known) > self.most:
            del known[next(iter(known))]

    def read(self, tokens: Sequence[int], start: int) -> None:
        """Remember the n-grams of a text from place `start` on: of each first token the last ones,
        which are found from the end, so that a long prompt is read at once."""
        latest: dict[int, dict[tuple[int, ...], None]] = defaultdict(dict)
        slices = (tokens[start + place :] for place in range(self.ngram))
        for ngram in reversed([*zip(*slices, strict=False)]):
            own = latest[ngram[0]]
            if len(own) < self.most:
                own[ngram] = None
        for first, own in latest.items():
            if first in self.continuations:
                for ngram in reversed(own):
                    self.add(ngram)
            else:  # none is the beginning of another
                self.continuations[first] = {ngram[1:]: None for ngram in reversed(own)}

    def starting_with(self, token: int) -> Iterable[tuple[int, ...]]:
        """What may follow `token`, the newest first."""
        return reversed(self.continuations.get(token, {}))


def num_branches(most: int, ngram: int, budget: int) -> int:
    """How many lookahead branches of `ngram` - 1 nodes a tree of `budget` nodes has: at least half
    of it, root apart, is left to guesses.

    >>> num_branches(4, 4, 25), num_branches(4, 4, 13), num_branches(4, 4, 4)
    (4, 2, 0)
    """
    return min(most, (budget - 1) // 2 // (ngram - 1))


class Branches(ABC):
    """The lookahead branches of one request. ends: each branch's last node in the last tree."""

    def __init__(self, stored: GuessPool):
        self.chance, self.stored = random.Random(0), stored
        self.read_to = 0
        self.ends: list[int] = []

    @abstractmethod
    def paths(self) -> list[list[int]]:
        """Each one's tokens from the root of the next tree on."""

    @abstractmethod
    def extend(self, said: list[list[int]]) -> None:
        """What the target says of each one, as `Guessing.said` has it."""

    def drawn(self, prompt: list[int], count: int) -> list[int]:
        """Tokens of the prompt to begin with."""
        return [self.chance.choice(prompt) for _ in range(count)]

    def read(self, tokens: list[int]) -> None:
        """Store the n-grams that the text has gained since the last call."""
        self.stored.read(tokens, self.read_to)
        self.read_to = max(self.read_to, len(tokens) - self.stored.ngram + 1)


@dataclass(eq=False, kw_only=True)
class Guessing(Drafter):
    """Settings of drafters with lookahead branches.

    ngram: tokens of an n-gram (N); guesses: verified at once at most, and kept of each first token
    (G). text: whether the n-grams of prompt and answer are stored, too. retrieval: guesses from a
    corpus where the others leave room, None for none. keep: whether later prompts find what earlier
    ones stored. accept_branches: whether tokens of branches are drafts, too, and may be accepted.
    """

    ngram: Annotated[int, Ge(2), Le(65536)]
    guesses: Size
    text: bool
    retrieval: Retrieval | None
    keep: bool
    accept_branches: bool

    def stored(self) -> GuessPool:
        """An empty store."""
        return GuessPool(self.ngram, self.guesses)

    @abstractmethod
    def branches(self, prompt: list[int], budget: int, stored: GuessPool) -> Branches:
        """The lookahead branches of one request, in trees of `budget` nodes."""

    def found(self, tokens: list[int], stored: GuessPool, room: int) -> list[Sequence[int]]:
        """Continuations of `tokens`, in the order in which they find room in `room` nodes."""
        return list(stored.starting_with(tokens[-1]))

    def said(self, logits: torch.Tensor, states: list[Branches]) -> torch.Tensor:
        """(B, branches, V), which may be written to -> (B, branches, n) tokens that the target says
        follow each branch, the likeliest first."""
        return logits.argmax(-1, keepdim=True)

    def additions(self) -> list[str]:
        return ["text"] * self.text + ["branches"] * self.accept_branches

    def attach(self, target: Target) -> "AttachedGuessing":
        return AttachedGuessing(target, self)


class AttachedGuessing(AttachedHost):
    """Guesses and lookahead branches in one tree, of which nodes keep their numbers."""

    mergeable = False

    def __init__(self, target: Target, settings: Guessing):
        super().__init__(target, settings)
        self.keeps = settings.keep
        self.retrieved = settings.retrieval and settings.retrieval.attach(target)
        self.kept: GuessPool | None = None

    def state(self, request: Request, budget: int) -> Branches:
        stored = self.kept or self.settings.stored()
        if self.keeps:
            self.kept = stored
        return self.settings.branches(list(request.tokens), budget, stored)

    def ask(self, verified: Verified, states: list[Branches]) -> Brought | None:
        """(B, branches, n) what the target says after each branch."""
        width = verified.trees.width  # of trees that were cut, as others joined, nothing is asked
        if verified.prompt or not all(state.ends and max(state.ends) < width for state in states):
            return None
        logits = verified.logits
        ends = on_device([state.ends for state in states], logits.device)
        return verified.bring(self.settings.said(logits[verified.each[:, None], ends], states))

    def learn(
        self, verified: Verified, states: list[Branches], brought: list[torch.Tensor] | None
    ) -> None:
        if brought is not None:
            for state, said in zip(states, brought[0].tolist(), strict=True):
                state.extend(said)

    def drafted(self, request: Request, state: Branches, budget: int) -> Draft:
        settings, tokens = self.settings, request.tokens
        if settings.text:
            state.read(tokens)
        ahead = state.paths()
        room = budget - 1 - len(ahead) * (settings.ngram - 1)
        if room < 0:  # as many were meant for larger trees
            ahead, room = [], budget - 1
        paths = PathTree(tokens[-1], 1 + room)
        found = settings.found(tokens, state.stored, room)[: settings.guesses]
        if self.retrieved is not None and len(found) < settings.guesses:
            found += self.retrieved.continuations(tokens)[: settings.guesses - len(found)]
        for guess in found:
            paths.add(guess[: max(0, request.room - 1)])
        paths.budget = budget
        confidence = 1.0 if settings.accept_branches else -1.0
        state.ends = [paths.add(path, confidence) for path in ahead]
        return paths.draft

    def memory(self) -> int:
        own = bytes_of(each.stored for each in self.states)
        return own + (0 if self.retrieved is None else self.retrieved.corpus.nbytes)

    def forget(self) -> None:
        self.kept = None
