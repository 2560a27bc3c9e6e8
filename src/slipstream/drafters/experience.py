"""What drafts have been worth, and what steps have cost: what `auto.py` chooses by.

A *near* drafter looks its drafts up on the host; a *working* one needs a forward of its own. What
trees of near drafters cost is what a step without drafts costs, of as many rows.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import accumulate, product
from math import log2
from statistics import median

import numpy as np

from slipstream.core.drafts import Draft

NONE = "plain"
"""The name of drafting nothing."""
MEMORY = 0.98
"""What a step's experience still counts after the next one."""
TRUST = 4.0
"""Claims are believed as if so many tokens had been right that were claimed."""
GLANCE = 8
"""A near drafter whose drafts have saved less time than they took drafts at every eighth step
alone."""
TRIAL, PAUSES = 4, (24, 1536)
"""Steps of a trial, and the shortest and the longest pause between two."""
FEW, SAMPLES, STALE = 3, 25, 1024
"""Of a number of rows the seconds of so many steps are kept, and for so many steps; of steps
without drafts the fewest."""
SIZES = tuple(sorted({2**n for n in range(14)} | {3 * 2**n for n in range(12)}))
"""Numbers of rows that costs are told apart by, and widths of trees that are considered."""


class Experience:
    """What drafts were worth so far, and what steps cost.

    near: of each near drafter the tokens it claimed and those that were right, recent ones first;
    working: of each other one its trials; seconds: of recent steps, by kind and number of rows, and
    costs: what they come to; host: seconds a step on the host, by drafter; saved: seconds that a
    near drafter's drafts promised to save, each time they were made, recent ones first.

    >>> record = Experience()
    >>> for rows, seconds in ((1, 1.0), (4, 2.0), (1, 1.0), (1, 1.0)):
    ...     record.passed("plain", rows, seconds)
    >>> sure, unsure = Draft.chain([7, 1, 2, 3], [1, 0.9, 0.8, 0.7]), Draft.chain([7, 1], [1, 0.5])
    >>> record.choice(1, {"lookup": [sure]}, [], 12), record.choice(1, {"lookup": [unsure]}, [], 12)
    (('lookup', 4), ('lookup', 2))
    >>> for _ in range(50):
    ...     record.judge("lookup", claimed=2.4, right=0)
    >>> record.choice(1, {"lookup": [sure]}, [], 12)
    ('plain', 1)
    """

    def __init__(self):
        self.near: dict[str, tuple[float, float]] = {}
        self.working: dict[str, Trials] = {}
        self.seconds: dict[tuple[str, int], deque[tuple[int, float]]] = {}
        self.costs: dict[str, tuple[list[int], list[float]]] = {}
        self.host: dict[str, float] = {}
        self.saved: dict[str, float] = {}
        self.steps = 0

    def judge(self, name: str, claimed: float, right: int) -> None:
        """A near drafter's draft claimed so many tokens, of which some were right."""
        before = self.near.get(name, (0.0, 0.0))
        self.near[name] = MEMORY * before[0] + claimed, MEMORY * before[1] + right

    def spent(self, spent: dict[str, float]) -> None:
        """Drafters took so many seconds on the host, of one step."""
        for name, seconds in spent.items():
            self.host[name] = 0.9 * self.host.get(name, seconds) + 0.1 * seconds

    def looks(self, name: str) -> bool:
        """Whether a near drafter is to draft for the next step."""
        pays = self.saved.get(name, 0.0) >= self.host.get(name, 0.0)
        return pays or self.steps % GLANCE == 0

    def passed(self, name: str, rows: int, seconds: float) -> None:
        """A step with trees of this drafter, of so many rows altogether, took so long."""
        self.steps += 1
        # Steps of near drafters cost what steps without drafts of as many rows do.
        kind = name if name in self.working else NONE
        kept = self.seconds.setdefault((kind, _size(rows)), deque(maxlen=SAMPLES))
        kept.append((self.steps, seconds))
        self.costs.pop(kind, None)

    def choice(
        self, requests: int, drafts: dict[str, list[Draft]], working: list[str], budget: int
    ) -> tuple[str, int]:
        """Who drafts next, and how many nodes of each tree are verified at most; drafts: of the
        near drafters, one for each request."""
        if len(self._fresh(NONE, requests)) < FEW:
            return NONE, 1
        for name in working:
            if self.working.setdefault(name, Trials()).due():
                return name, self.working[name].width(budget)
        found = {(NONE, 1): requests / self._cost(NONE, requests)}
        for name, width in product(working, sizes_up_to(budget)[1:]):
            tokens = requests * (1 + self.working[name].promised(width))
            found[name, width] = tokens / self._cost(name, requests * width)
        best = max(found, key=found.__getitem__)
        # The quickest to look is credited first: another one with the same draft saves nothing.
        for name in sorted(drafts, key=lambda name: self.host.get(name, 0.0)):
            claimed, right = self.near.get(name, (0.0, 0.0))
            before, rate = best, found[best]
            for width, tokens in _promised(drafts[name], (right + TRUST) / (claimed + TRUST)):
                found[name, width] = (requests + tokens) / self._cost(NONE, requests * width)
                best = max(best, (name, width), key=found.__getitem__)
            taken = self._cost(NONE, requests * best[1]) if best != before else 0.0
            saved = (found[best] / rate - 1.0) * taken
            # At first as if it saved as much as a step takes: it is looked at for a while.
            self.saved[name] = 0.95 * self.saved.get(name, self._cost(NONE, 1)) + 0.05 * saved
        for name in working:
            self.working[name].decide(best[0] == name)
        return best

    def _cost(self, name: str, rows: int) -> float:
        """Seconds of a step: between what was measured lately, and beyond it what most rows took,
        so that more will be tried. A step never costs more than one of more rows."""
        if name not in self.costs:
            kinds = [size for kind, size in self.seconds if kind == name]
            sizes = [SIZES[size] for size in sorted(kinds) if self._fresh(name, SIZES[size])]
            medians = [median(self._fresh(name, size)) for size in sizes]
            self.costs[name] = sizes, [*accumulate(medians[::-1], min)][::-1]
        known = self.costs[name]
        if known[0]:
            return float(np.interp(rows, *known))
        return 0.0 if name == NONE else self._cost(NONE, rows)

    def _fresh(self, name: str, rows: int) -> list[float]:
        """Seconds of recent steps of about so many rows."""
        kept = self.seconds.get((name, _size(rows)), ())
        return [seconds for step, seconds in kept if step > self.steps - STALE]


class Trials:
    """A drafter that is judged by those of its drafts that were verified: as calibrations find it,
    a tree of g nodes has some gain times log2(g) tokens right.

    right: drafted tokens that were right, and `logs`, logarithms of the nodes of their trees,
    recent ones first; left: steps of the trial that is going on; idle: steps since it drafted,
    `pause` the least of them before the next trial.
    """

    def __init__(self):
        self.right, self.logs = 0.0, 0.0
        self.left, self.idle, self.pause = TRIAL, 0, PAUSES[0]

    def promised(self, width: int) -> float:
        """Drafted tokens that should be right in a tree of so many nodes."""
        return self.right / self.logs * log2(width) if self.logs else 0.0

    def count(self, right: int, width: int) -> None:
        self.right, self.logs = MEMORY * self.right + right, MEMORY * self.logs + log2(width)

    def width(self, budget: int) -> int:
        """Nodes of the next tree of a trial: as many as may be and half as many, in turn, so that
        what a node costs shows."""
        return budget if self.left % 2 else min(budget, max(2, budget // 2))

    def due(self) -> bool:
        """Whether the next step is one of a trial."""
        if self.idle >= self.pause:
            # The trial must be able to change the verdict.
            self.right, self.logs = self.right / 4, self.logs / 4
            self.left, self.idle, self.pause = TRIAL, 0, min(4 * self.pause, PAUSES[1])
        self.left -= 1
        return self.left >= 0

    def decide(self, chosen: bool) -> None:
        """Outside of trials it was chosen for the next step, or not."""
        self.idle = 0 if chosen else self.idle + 1
        self.pause = PAUSES[0] if chosen else self.pause


def _promised(drafts: list[Draft], trust: float) -> Iterator[tuple[int, float]]:
    """Widths of trees, and how many drafted tokens all of them should have right then."""
    sums = [[*accumulate(draft.confidences[1:], initial=0.0)] for draft in drafts]
    for width in sizes_up_to(max(map(len, sums)))[1:]:
        yield width, trust * sum(own[min(width, len(own)) - 1] for own in sums)


def sizes_up_to(most: int) -> list[int]:
    """Sizes of trees to choose from.

    >>> sizes_up_to(10), sizes_up_to(1)
    ([1, 2, 3, 4, 6, 8, 10], [1])
    """
    return sorted({min(most, size) for size in SIZES[: _size(most) + 1]})


def _size(rows: int) -> int:
    """The place in `SIZES`.

    >>> [SIZES[_size(rows)] for rows in (1, 4, 5, 7, 13, 10_000)]
    [1, 4, 6, 8, 16, 8192]
    """
    return min(bisect_left(SIZES, rows), len(SIZES) - 1)
