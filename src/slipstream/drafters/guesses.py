"""What Lookahead and SPECTRA share: sequences that ride along in the verifying forward.

Some branches of the draft tree are there to be extended by the target, one token a step, whether
they are accepted or not; what they become is stored and guessed later. As branches they see what
they should, and are verified, too.
"""

import random
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from slipstream.core.errors import InputError
from slipstream.core.growth import PathTree
from slipstream.core.tree import DraftTree
from slipstream.drafters.base import Context, Drafter, Outlook, Step
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


def riding(most: int, ngram: int, budget: int) -> int:
    """How many sequences of `ngram` - 1 rows ride along in a tree of `budget` nodes: at least half
    of them, root apart, are left to guesses.

    >>> riding(4, 4, 25), riding(4, 4, 13), riding(4, 4, 4)
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


class Riders:
    """The sequences of one prompt. ends: of the last tree, the node of each one's last token."""

    def __init__(self, prompt: list[int], stored: Stored):
        self.chance, self.stored = random.Random(0), stored
        self.prompt, self.read_to = prompt, 0
        self.ends: list[int] = []

    def drawn(self, count: int) -> list[int]:
        """Tokens of the prompt to begin with."""
        return [self.chance.choice(self.prompt) for _ in range(count)]

    def paths(self) -> list[list[int]]:
        """Each one's tokens from the root of the next tree on."""
        raise NotImplementedError

    def extend(self, ranked: list[list[int]]) -> None:
        """What the target says follows each one, the likeliest first."""
        raise NotImplementedError

    def read(self, tokens: list[int], size: int) -> None:
        """Store the n-grams of the text that have come to it."""
        for start in range(self.read_to, len(tokens) - size + 1):
            self.stored.add(tokens[start : start + size])
        self.read_to = max(self.read_to, len(tokens) - size + 1)


class Guessing(Drafter):
    """Base of drafters with riders.

    count: most riders; ngram: tokens of an n-gram; most: guesses verified at once, and kept of each
    first token. text: whether the n-grams of prompt and answer are stored, too. retrieval: guesses
    from a corpus where the others leave room, None for none. keep: whether later prompts find what
    earlier ones stored. ranks: how many of the likeliest tokens after a rider are looked at.
    """

    mergeable = False
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
        self.kept: Stored | None = None
        self.riders: list[Riders] = []

    def stored(self) -> Stored:
        """An empty store."""
        raise NotImplementedError

    def rider(self, prompt: list[int], count: int, stored: Stored) -> Riders:
        """What rides along with one prompt."""
        raise NotImplementedError

    def guesses(self, tokens: list[int], stored: Stored, room: int) -> list[Sequence[int]]:
        """Continuations of `tokens`, in the order in which they find room in `room` nodes."""
        raise NotImplementedError

    def bind(self, target: Target) -> Target:
        if self.retrieval is not None:
            self.retrieval.bind(target)
        return target

    def begin(self, contexts: list[Context], budget: int) -> None:
        count = riding(self.count, self.ngram, budget)
        for context in contexts:
            stored = self.stored()
            if self.keep:
                stored = self.kept = self.kept or stored
            context.state = self.rider(list(context.tokens), count, stored)
        self.riders = [context.state for context in contexts]

    def forget(self) -> None:
        self.kept = None

    @property
    def store_bytes(self) -> int:
        own = bytes_of(part for each in self.riders for part in each.stored.parts)
        return own + (0 if self.retrieval is None else self.retrieval.nbytes)

    def propose(self, contexts: list[Context], budget: int) -> list[DraftTree]:
        with contexts[0].clock.share("draft"):
            return [self._tree(context, budget) for context in contexts]

    def _tree(self, context: Context, budget: int) -> DraftTree:
        riders: Riders = context.state
        if self.text:
            riders.read(context.tokens, self.ngram)
        riding_paths = riders.paths()
        room = budget - 1 - len(riding_paths) * (self.ngram - 1)
        paths = PathTree(context.tokens[-1], 1 + room)
        found = self.guesses(context.tokens, riders.stored, room)[: self.most]
        if self.retrieval is not None and len(found) < self.most:
            found += self.retrieval.continuations(context.tokens)[: self.most - len(found)]
        for guess in found:
            paths.add(guess[: context.max_depth])
        paths.budget = budget
        riders.ends = [paths.add(path) for path in riding_paths]
        return paths.tree()

    def foresee(self, contexts: list[Context], outlook: Outlook) -> tuple[torch.Tensor, ...]:
        """(B, riders, ranks) what the target would say after each rider, the likeliest first."""
        if outlook.logits is None or not contexts[0].state.ends:
            return ()
        ends = torch.tensor([context.state.ends for context in contexts])
        ends = ends.to(outlook.logits.device, non_blocking=True)
        logits = outlook.logits[torch.arange(len(ends), device=ends.device)[:, None], ends]
        return (logits.topk(min(self.ranks, logits.shape[-1])).indices,)

    def observe(self, context: Context, step: Step) -> None:
        if step.foreseen:
            with context.clock.share("draft"):
                context.state.extend(step.foreseen[0].tolist())
