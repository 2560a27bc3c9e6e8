"""What drafts have been worth, and what steps have cost: what `auto.py` chooses by.

A *near* drafter looks its drafts up on the host; a *working* one needs a forward of its own. What
trees of near drafters cost is what a step without drafts costs, of as many rows.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import accumulate, product
from math import log2

from slipstream.core.drafts import Draft

NONE = "plain"
"""The name of drafting nothing."""
MEMORY = 0.98
"""What a step's experience still counts after the next one."""
OTHER = 0.9
"""What all experience of drafts still counts in the next prompt."""
TRUST = 4.0
"""Claims are believed as if so many tokens had been right that were claimed."""
GLANCE, PROMPTS, REST = 8, 4, 64
"""A near drafter whose drafts have saved less time than they took drafts at every eighth step
alone, of every fourth prompt; else it rests but for every 64th step."""
MARGIN = 0.25
"""What is drafted must promise so many tokens more than it costs, of each request: the most
promising of many drafts promises too much, and some of its tokens would have been cheap later."""
PACE = 0.995
"""What a step's tokens and seconds still count after the next one in the pace of decoding, which
says what tokens a second of a draft must be worth."""
TRIAL, PAUSES = 4, (24, 1536)
"""Steps of a trial, and the shortest and the longest pause between two."""
FEW, SAMPLES, STALE = 3, 25, 1024
"""Of steps without drafts the fewest that tell their cost; of a number of rows the seconds of so
many steps are kept, and for so many steps after the last of them."""
NEWEST, OUTLIER = 0.2, 2.0
"""What the newest step counts in how much longer steps take than usual, all alike, as they do after
long texts; and the most that one may take longer than those before."""
SIZES = tuple(sorted({2**n for n in range(14)} | {3 * 2**n for n in range(12)}))
"""Numbers of rows that costs are told apart by, and widths of trees that are considered."""


class Experience:
    """What drafts were worth so far, and what steps cost.

    near: of each near drafter the tokens it claimed and those that were right, recent ones first;
    working: of each other one its trials; seconds: of recent steps, by kind and number of rows, and
    costs: what they come to; host: seconds a step on the host, by drafter; saved: seconds that a
    near drafter's drafts promised to save, each time they were made, recent ones first; tokens,
    elapsed: of recent steps; last: who was chosen last; level: how many times as long as usual
    steps take now.

    >>> record = Experience()
    >>> for rows, seconds in ((1, 1.0), (4, 2.0), (1, 1.0), (1, 1.0)):
    ...     record.passed("plain", rows, seconds)
    >>> sure, unsure = Draft.chain([7, 1, 2, 3], [1, 0.9, 0.8, 0.7]), Draft.chain([7, 1], [1, 0.7])
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
        self.seconds: dict[str, dict[int, Recent]] = {}
        self.costs: dict[str, tuple[list[int], list[float]]] = {}
        self.host: dict[str, float] = {}
        self.saved: dict[str, float] = {}
        self.prompts, self.steps, self.tokens, self.elapsed = 0, 0, 0.0, 0.0
        self.last, self.level = "", 1.0

    def judge(self, name: str, claimed: float, right: int) -> None:
        """A near drafter's draft claimed so many tokens, of which some were right."""
        before = self.near.get(name, (0.0, 0.0))
        self.near[name] = MEMORY * before[0] + claimed, MEMORY * before[1] + right

    def spent(self, spent: dict[str, float]) -> None:
        """Drafters took so many seconds on the host, of one step."""
        for name, seconds in spent.items():
            self.host[name] = 0.9 * self.host.get(name, seconds) + 0.1 * seconds

    def opened(self, near: Iterable[str]) -> set[str]:
        """A prompt begins, whose text may be unlike those before: what drafts were worth in these
        counts less. Returns which near drafters rest."""
        self.prompts += 1
        rests = {name for name in near if self.prompts % PROMPTS and not self._pays(name)}
        for name in self.near.keys() - rests:
            claimed, right = self.near[name]
            self.near[name] = OTHER * claimed, OTHER * right
        for trials in self.working.values():
            trials.right, trials.logs = OTHER * trials.right, OTHER * trials.logs
        return rests

    def looks(self, name: str, rests: bool = False) -> bool:
        """Whether a near drafter is to draft for the next step."""
        return self._pays(name) or self.steps % (REST if rests else GLANCE) == 0

    def _pays(self, name: str) -> bool:
        return self.saved.get(name, 0.0) >= self.host.get(name, 0.0)

    def went(self, tokens: int, seconds: float) -> None:
        """A step decided so many tokens in so long, whoever worked in it."""
        self.tokens = PACE * self.tokens + tokens
        self.elapsed = PACE * self.elapsed + seconds

    def passed(self, name: str, rows: int, seconds: float) -> None:
        """A step with trees of this drafter, of so many rows altogether, took so long."""
        self.steps += 1
        # Steps of near drafters cost what steps without drafts of as many rows do.
        kind = name if name in self.working else NONE
        kept, size = self.seconds.setdefault(kind, {}), _size(rows)
        if size in kept:
            longer = seconds / kept[size].median
            self.level *= 1 + NEWEST * (min(longer / self.level, OUTLIER) - 1)
        kept.setdefault(size, Recent()).add(seconds / self.level, self.steps)
        self.costs.pop(kind, None)

    def choice(
        self, requests: int, drafts: dict[str, list[Draft]], working: list[str], budget: int
    ) -> tuple[str, int]:
        """Who drafts next, and how many nodes of each tree are verified at most; drafts: of the
        near drafters, one for each request."""
        own = self.seconds.get(NONE, {}).get(_size(requests))
        if own is None or len(own.seconds) < FEW or own.last <= self.steps - STALE:
            return NONE, 1
        for name in working:
            if self.working.setdefault(name, Trials()).due():
                self.last = name
                return name, self.working[name].width(budget)
        if self.last == NONE and not drafts:  # no more is known than a step ago
            for name in working:
                self.working[name].decide(False)
            return NONE, 1
        alone = self._cost(NONE, requests)
        pace = self.level * self.tokens / self.elapsed if self.elapsed else requests / alone
        found = {(NONE, 1): requests - pace * alone}
        for name, width in product(working, sizes_up_to(budget)[1:]):
            tokens = requests * (1 + self.working[name].promised(width))
            found[name, width] = tokens - pace * self._cost(name, requests * width)
        best = max(found, key=found.__getitem__)
        # The quickest to look is credited first: another one with the same draft saves nothing.
        for name in sorted(drafts, key=lambda name: self.host.get(name, 0.0)):
            claimed, right = self.near.get(name, (0.0, 0.0))
            before = found[best]
            for width, tokens in _promised(drafts[name], (right + TRUST) / (claimed + TRUST)):
                found[name, width] = requests + tokens - pace * self._cost(NONE, requests * width)
                best = max(best, (name, width), key=found.__getitem__)
            saved = self.level * (found[best] - before) / pace
            # At first as if it saved as much as a step takes: it is looked at for a while.
            self.saved[name] = 0.95 * self.saved.get(name, self._cost(NONE, 1)) + 0.05 * saved
        if found[best] < found[NONE, 1] + MARGIN * requests:
            best = NONE, 1
        self.last = best[0]
        for name in working:
            self.working[name].decide(best[0] == name)
        return best

    def _cost(self, name: str, rows: int) -> float:
        """Seconds of a step: between what was measured lately, and beyond it what most rows took,
        so that more will be tried. A step never costs more than one of more rows."""
        if name not in self.costs:
            own = sorted(self.seconds.get(name, {}).items())
            fresh = [(size, each) for size, each in own if each.last > self.steps - STALE]
            least = accumulate((each.median for _, each in fresh[::-1]), min)
            self.costs[name] = [SIZES[size] for size, _ in fresh], [*least][::-1]
        sizes, seconds = self.costs[name]
        if not sizes:
            return 0.0 if name == NONE else self._cost(NONE, rows)
        place = bisect_left(sizes, rows)
        if place in (0, len(sizes)):
            return seconds[max(0, place - 1)]
        share = (rows - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])


class Recent:
    """seconds: of the last steps of a size, and their median; last: the number of the last one."""

    def __init__(self):
        self.seconds: deque[float] = deque(maxlen=SAMPLES)
        self.median, self.last = 0.0, 0

    def add(self, seconds: float, step: int) -> None:
        self.seconds.append(seconds)
        self.median, self.last = sorted(self.seconds)[len(self.seconds) // 2], step


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
