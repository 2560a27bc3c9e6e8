"""At every step the drafter whose draft promises most tokens a second, or none: chosen online.

What drafters that look n-grams up would have got right shows as soon as the answer goes on, whether
their draft was verified or not: they are judged at every step, for nothing. What they claim of a
draft is corrected by how their claims have held, so that also how many of its nodes are worth their
rows is decided at every step. A drafter that must work in order to draft (streams, Medusa heads) is
judged by those of its drafts that were verified, and has a trial now and then, the more rarely the
more of them it has lost. What a step costs is measured as it goes.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import median

import numpy as np

from slipstream.core.drafts import Draft
from slipstream.core.trees import Trees
from slipstream.drafters.base import HostSession, Request, Session, Verified
from slipstream.drafters.several import AttachedSeveral, Several
from slipstream.targets.target import Target

NONE = "plain"
"""The name of drafting nothing."""
MEMORY = 0.98
"""What a step's experience still counts after the next one."""
TRUST = 4.0
"""Claims are believed as if so many tokens had been right that were claimed."""
TRIAL, PAUSES = 6, (24, 768)
"""Steps of a trial, and the shortest and the longest pause between two."""
SAMPLES, STALE = 9, 1024
"""Of a number of rows the seconds of so many steps are kept, and for so many steps."""
SIZES = tuple(sorted({2**n for n in range(14)} | {3 * 2**n for n in range(12)}))
"""Numbers of rows that costs are told apart by, and widths of trees that are considered."""


class Auto(Several):
    """Chooses among `drafters`, by name, and drafting nothing, at every step."""

    def attach(self, target: Target) -> "AttachedAuto":
        return AttachedAuto(*self.attached_parts(target))


class AttachedAuto(AttachedSeveral):
    """record: `Experience`, of all prompts, also of those that are answered at the same time."""

    def new_record(self) -> "Experience":
        return Experience()

    def start(self, requests: Sequence[Request], budget: int) -> "AutoSession":
        return AutoSession(self, requests, budget)


class AutoSession(Session):
    """near: sessions whose drafts cost no forward, `working` the others'; watched: of each request
    the drafts whose worth is not known yet; running: who drafts the trees that are verified now, of
    how many rows, and since when."""

    def __init__(self, attached: AttachedAuto, requests: Sequence[Request], budget: int):
        self.attached, self.requests = attached, list(requests)
        sessions = attached.sessions(requests, budget)
        self.near = {n: each for n, each in sessions.items() if isinstance(each, HostSession)}
        self.working = {n: each for n, each in sessions.items() if n not in self.near}
        self.visitors = [visitor for each in sessions.values() for visitor in each.visitors]
        self.extra_rows = sum(session.extra_rows for session in sessions.values())
        self.watched: list[list[Watched]] = [[] for _ in requests]
        self.running: tuple[str, int, float] | None = None

    @property
    def sessions(self) -> dict[str, Session]:
        return self.near | self.working

    def ask(self, verified: Verified) -> None:
        for session in self.sessions.values():
            session.ask(verified)

    def draft(self, verified: Verified, budget: int) -> Trees:
        decided, now = verified.host(), time.perf_counter()
        self._learn(decided, now)
        drafts = {name: session.drafts(verified, budget) for name, session in self.near.items()}
        for name, own in drafts.items():
            for watched, request, draft in zip(self.watched, self.requests, own, strict=True):
                if len(draft) > 1:
                    watched.append(Watched(name, draft, len(request.tokens)))
        name, width = self.attached.record.choice(drafts, list(self.working), budget)
        trees = Trees.roots(verified.next_tokens)
        for other, session in self.working.items():
            found = session.draft(verified, budget if other == name else 1)
            trees = found if other == name else trees
        if name in drafts:
            trees = Trees.of([draft.first(width) for draft in drafts[name]], trees.tokens.device)
        self.running = name, len(decided) * width, now
        return trees

    def _learn(self, decided: list[list[int]], now: float) -> None:
        """Take up what became of the last trees, and of all drafts whose worth is known now."""
        record = self.attached.record
        if self.running is not None:
            name, rows, since = self.running
            record.passed(name, rows, now - since)
            if name in self.working:
                for tokens in decided:
                    record.worked(name, len(tokens) - 1)
        for place, request in enumerate(self.requests):
            known = len(request.tokens)
            for each in self.watched[place]:
                if each.known_at <= known:
                    record.judge(each.name, each.claimed, each.right(request.tokens))
            self.watched[place] = [each for each in self.watched[place] if each.known_at > known]

    def keep(self, indices: list[int]) -> None:
        self.requests = [self.requests[index] for index in indices]
        self.watched = [self.watched[index] for index in indices]
        for session in self.sessions.values():
            session.keep(indices)

    def join(self, other: "AutoSession") -> None:
        self.requests += other.requests
        self.watched += other.watched
        for name, session in self.sessions.items():
            session.join(other.sessions[name])
        self.running = None  # the trees are of both, and the time was shared with prompts


class Watched:
    """A draft of a near drafter, made when its text had `start` tokens; known_at: how long the text
    is when all is known of it."""

    def __init__(self, name: str, draft: Draft, start: int):
        self.name, self.draft, self.start = name, draft, start
        self.known_at = start + max(draft.depths())

    @property
    def claimed(self) -> float:
        """How many tokens of it should be right."""
        return sum(self.draft.confidences[1:])

    def right(self, tokens: list[int]) -> int:
        """How many were."""
        return self.draft.agreement(tokens[self.start : self.known_at])


class Experience:
    """What drafts were worth so far, and what steps cost.

    near: of each near drafter the tokens it claimed and those that were right, recent ones first;
    working: of each other one, how many drafted tokens its steps had.

    >>> record = Experience()
    >>> for rows, seconds in ((1, 1.0), (4, 2.0)):
    ...     record.passed("plain", rows, seconds)
    >>> sure, unsure = Draft.chain([7, 1, 2, 3], [1, 0.9, 0.8, 0.7]), Draft.chain([7, 1], [1, 0.5])
    >>> record.choice({"lookup": [sure]}, [], 12), record.choice({"lookup": [unsure]}, [], 12)
    (('lookup', 4), ('lookup', 2))
    >>> for _ in range(50):
    ...     record.judge("lookup", claimed=2.4, right=0)
    >>> record.choice({"lookup": [sure]}, [], 12)
    ('plain', 1)
    """

    def __init__(self):
        self.near: dict[str, tuple[float, float]] = {}
        self.working: dict[str, Trials] = {}
        self.seconds: dict[str, dict[int, deque[tuple[int, float]]]] = {}
        self.steps = 0

    def judge(self, name: str, claimed: float, right: int) -> None:
        """A near drafter's draft claimed so many tokens, of which some were right."""
        before = self.near.get(name, (0.0, 0.0))
        self.near[name] = MEMORY * before[0] + claimed, MEMORY * before[1] + right

    def worked(self, name: str, right: int) -> None:
        """Another drafter's draft, verified, had so many tokens right."""
        self.working[name].count(right)

    def passed(self, name: str, rows: int, seconds: float) -> None:
        """A step with trees of this drafter, of so many rows altogether, took so long."""
        self.steps += 1
        kept = self.seconds.setdefault(self._kind(name), {}).setdefault(_size(rows), deque())
        kept.append((self.steps, seconds))
        if len(kept) > SAMPLES:
            kept.popleft()

    def choice(
        self, drafts: dict[str, list[Draft]], working: list[str], budget: int
    ) -> tuple[str, int]:
        """Who drafts next, and how many nodes of each tree are verified at most; drafts: of the
        near drafters, one for each request."""
        count = len(next(iter(drafts.values()), [None]))
        for name in working:
            if self.working.setdefault(name, Trials()).due():
                return name, budget
        found = {(NONE, 1): count / self._cost(NONE, count)}
        for name, own in drafts.items():
            for width, tokens in _promised(own, self._trust(name)):
                found[name, width] = (count + tokens) / self._cost(name, count * width)
        for name in working:
            tokens = count * (1 + self.working[name].mean)
            found[name, budget] = tokens / self._cost(name, count * budget)
        best = max(found, key=found.__getitem__)
        for name in working:
            self.working[name].decide(best[0] == name)
        return best

    def _trust(self, name: str) -> float:
        """What a near drafter's claims are to be multiplied by."""
        claimed, right = self.near.get(name, (0.0, 0.0))
        return (right + TRUST) / (claimed + TRUST)

    def _cost(self, name: str, rows: int) -> float:
        """Seconds of a step: between what was measured lately, and beyond it what most rows took,
        so that more will be tried. A step never costs less than one of fewer rows."""
        known = {
            SIZES[size]: median(seconds for _, seconds in kept)
            for size, kept in self.seconds.get(self._kind(name), {}).items()
            if kept[-1][0] > self.steps - STALE
        }
        if known:
            sizes = sorted(known)
            costs = accumulate((known[size] for size in sizes), max)
            return float(np.interp(rows, sizes, list(costs)))
        return 1.0 if self._kind(name) == NONE else self._cost(NONE, rows)

    def _kind(self, name: str) -> str:
        """Steps of near drafters cost what steps without drafts of as many rows do."""
        return name if name in self.working else NONE


class Trials:
    """A drafter that is judged by those of its drafts that were verified.

    right: drafted tokens that were right, and in how many `steps`, recent ones first; left: steps
    of the trial that is going on; idle: steps since it drafted, `pause` the least of them before
    the next trial.
    """

    def __init__(self):
        self.right, self.steps = 0.0, 0.0
        self.left, self.idle, self.pause = TRIAL, 0, PAUSES[0]

    @property
    def mean(self) -> float:
        return self.right / self.steps if self.steps else 0.0

    def count(self, right: int) -> None:
        self.right, self.steps = MEMORY * self.right + right, MEMORY * self.steps + 1

    def due(self) -> bool:
        """Whether the next step is one of a trial."""
        if self.idle >= self.pause:
            # The trial must be able to change the verdict.
            self.right, self.steps = self.right / 4, self.steps / 4
            self.left, self.idle, self.pause = TRIAL, 0, min(2 * self.pause, PAUSES[1])
        self.left -= 1
        return self.left >= 0

    def decide(self, chosen: bool) -> None:
        """Outside of trials it was chosen for the next step, or not."""
        self.idle = 0 if chosen else self.idle + 1
        self.pause = PAUSES[0] if chosen else self.pause


def _promised(drafts: list[Draft], trust: float) -> Iterator[tuple[int, float]]:
    """Widths of trees, and how many drafted tokens all of them should have right then."""
    sums = [[*accumulate(draft.confidences[1:], initial=0.0)] for draft in drafts]
    longest = max(map(len, sums))
    for width in sorted({min(longest, size) for size in SIZES[1 : _size(longest) + 1]}):
        yield width, trust * sum(own[min(width, len(own)) - 1] for own in sums)


def _size(rows: int) -> int:
    """The place in `SIZES`.

    >>> [SIZES[_size(rows)] for rows in (1, 4, 5, 7, 13, 10_000)]
    [1, 4, 6, 8, 16, 8192]
    """
    return min(bisect_left(SIZES, rows), len(SIZES) - 1)
