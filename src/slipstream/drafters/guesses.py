"""What Lookahead and SPECTRA share: branches that the target extends while it verifies others.

These lookahead branches of the draft tree grow by one token a step, whether they are accepted or
not; what they become is stored and guessed later. As branches they see what they should, and are
verified, too.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

from slipstream.core.drafts import Draft, PathTree
from slipstream.core.errors import InputError
from slipstream.core.transfer import on_device
from slipstream.drafters.base import AttachedHost, Drafter, HostSession, Request, Verified
from slipstream.drafters.memory import bytes_of
from slipstream.drafters.suffixes import Retrieval
from slipstream.targets.target import Target


class GuessPool:
    """At most `most` continuations of each first token, of up to `ngram` - 1 tokens; the one that
    was added longest ago is forgotten first, and what another one begins with has no entry.

    >>> pool = GuessPool(3, 2)
    >>> for guess in ([1, 2], [1, 2, 3], [1, 4, 5], [1, 2], [1, 6, 7]):
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
        known, new = self.continuations.setdefault(first, {}), tuple(rest)
        for other in list(known):
            shorter = min(len(other), len(new))
            if other[:shorter] == new[:shorter]:
                del known[other]
                new = max(new, other, key=len)
        known[new] = None
        if len(known) > self.most:
            del known[next(iter(known))]

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


class Stored(Protocol):
    """What guesses are looked up in."""

    def add(self, ngram: Sequence[int]) -> None:
        """Store an n-gram of `Guessing.ngram` tokens, of which the last one is new."""

    @property
    def parts(self) -> list[object]:
        """The dictionaries, to be counted."""


class Branches(ABC):
    """The lookahead branches of one request. ends: of the last tree, the node of each one's last
    token."""

    def __init__(self, stored: Stored):
        self.chance, self.stored = random.Random(0), stored
        self.read_to = 0
        self.ends: list[int] = []

    @abstractmethod
    def paths(self) -> list[list[int]]:
        """Each one's tokens from the root of the next tree on."""

    @abstractmethod
    def extend(self, ranked: list[list[int]]) -> None:
        """What the target says follows each one, the likeliest first."""

    def drawn(self, prompt: list[int], count: int) -> list[int]:
        """Tokens of the prompt to begin with."""
        return [self.chance.choice(prompt) for _ in range(count)]

    def read(self, tokens: list[int], size: int) -> None:
        """Store the n-grams of the text that have come to it."""
        for start in range(self.read_to, len(tokens) - size + 1):
            self.stored.add(tokens[start : start + size])
        self.read_to = max(self.read_to, len(tokens) - size + 1)


class Guessing(Drafter):
    """Settings of drafters with lookahead branches.

    count: most branches; ngram: tokens of an n-gram; most: guesses verified at once, and kept of
    each first token. text: whether the n-grams of prompt and answer are stored, too. retrieval:
    guesses from a corpus where the others leave room, None for none. keep: whether later prompts
    find what earlier ones stored. ranks: how many of the likeliest tokens after a branch are looked
    at.
    """

    ranks = 1

    def __init__(
        self,
        count: int,
        ngram: int,
        most: int,
        text: bool,
        retrieval: Retrieval | None,
        keep: bool,
    ):
        if count < 1 or ngram < 2 or most < 1:
            raise InputError(
                "drafter: needs at least 1 guess and 1 candidate or column, and ngram of at least 2"
            )
        self.count, self.ngram, self.most = count, ngram, most
        self.text, self.retrieval, self.keep = text, retrieval, keep

    @abstractmethod
    def stored(self) -> Stored:
        """An empty store."""

    @abstractmethod
    def branches(self, prompt: list[int], count: int, stored: Stored) -> Branches:
        """The lookahead branches of one request."""

    @abstractmethod
    def guesses(self, tokens: list[int], stored: Stored, room: int) -> list[Sequence[int]]:
        """Continuations of `tokens`, in the order in which they find room in `room` nodes."""

    def attach(self, target: Target) -> "AttachedGuessing":
        return AttachedGuessing(target, self)


class GuessingSession(HostSession):
    """Guesses and lookahead branches in one tree, of which nodes keep their numbers."""

    attached: "AttachedGuessing"

    def ask(self, verified: Verified) -> None:
        """(B, branches, ranks) what the target says after each branch, the likeliest first."""
        self._said = None
        if not verified.prompt and self.states[0].ends:
            logits = verified.logits
            ends = on_device([state.ends for state in self.states], logits.device)
            ranks = min(self.attached.settings.ranks, logits.shape[-1])
            ranked = logits[verified.each[:, None], ends].topk(ranks).indices
            self._said = verified.bring(ranked)

    def learn(self, verified: Verified) -> None:
        if self._said is not None:
            (ranked,) = self._said()
            for state, own in zip(self.states, ranked.tolist(), strict=True):
                state.extend(own)

    def drafted(self, request: Request, state: Branches, budget: int) -> Draft:
        settings, tokens = self.attached.settings, request.tokens
        if settings.text:
            state.read(tokens, settings.ngram)
        ahead = state.paths()
        room = budget - 1 - len(ahead) * (settings.ngram - 1)
        paths = PathTree(tokens[-1], 1 + room)
        found = settings.guesses(tokens, state.stored, room)[: settings.most]
        if self.attached.retrieved is not None and len(found) < settings.most:
            more = self.attached.retrieved.continuations(tokens)
            found += more[: settings.most - len(found)]
        for guess in found:
            paths.add(guess[: max(0, request.room - 1)])
        paths.budget = budget
        state.ends = [paths.add(path) for path in ahead]
        return paths.draft()


class AttachedGuessing(AttachedHost):
    mergeable, session = False, GuessingSession

    def __init__(self, target: Target, settings: Guessing):
        super().__init__(target, settings)
        self.keeps = settings.keep
        self.retrieved = settings.retrieval and settings.retrieval.attach(target)
        self.kept: Stored | None = None

    def state(self, request: Request, budget: int) -> Branches:
        settings, stored = self.settings, self.settings.stored()
        if self.keeps:
            stored = self.kept = self.kept or stored
        count = num_branches(settings.count, settings.ngram, budget)
        return settings.branches(list(request.tokens), count, stored)

    def memory(self) -> int:
        own = bytes_of(part for each in self.states for part in each.stored.parts)
        return own + (0 if self.retrieved is None else self.retrieved.nbytes)

    def forget(self) -> None:
        self.kept = None
