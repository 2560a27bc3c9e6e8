"""What drafts have been worth, and what steps cost: what `auto.py` chooses by.

What drafts are worth depends on the text. Evidence is therefore kept by answer, an `Episode`; a new
one begins with what was found in prompts like its own, and where there were none, drafters have
the benefit of the doubt. A *near* drafter looks its drafts up on the host; a *working* one needs a
forward of its own. What trees of near drafters cost is what a step without drafts costs, of as many
rows.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Reversible, Sequence
from functools import cache
from heapq import nlargest
from itertools import accumulate
from math import log2

import numpy as np

from slipstream.core.drafts import Draft

NONE, NEAR = "plain", "near"
"""The names of drafting nothing, and of what near drafters draft, in one tree."""
CLAIMS, TREES, LOOKS, PACE = "claims", "trees", "looks", "pace"
MOST = {CLAIMS: 40.0, TREES: 20.0, LOOKS: 16.0, PACE: 80.0}
"""Kinds of evidence, each a pair. CLAIMS: tokens that a near drafter claimed, and those right;
TREES: log2 of the nodes of a working drafter's trees, and tokens right; LOOKS: how often a near
drafter was looked at, and seconds that its drafts promised to save; PACE: tokens decided, and
seconds taken, by trees of near drafters and by others (""). Pairs of earlier prompts are scaled
down where their first number exceeds the value here."""
MEMORY = 0.98
"""Factor by which new evidence of a kind scales down all earlier evidence of that kind."""
KEPT, NEIGHBOURS = 64, 8
"""So many answers are remembered, of which those to the most similar prompts count."""
ALIKE = 0.15
"""Prompts that share this part of their tokens count in full; others less, as the square of it."""
TRUST = 2.0
"""Prior of claims: so many tokens claimed, all of them right."""
HOPE = 4.0
"""Prior of trees of working drafters: so many log2 of nodes, and as many tokens right."""
GLANCE, SURE = 24, 2.0
"""A near drafter whose drafts saved less time than they took drafts at every 24th step alone; SURE:
looks that tell."""
MARGIN, WORKING_MARGIN = 0.2, 0.1
"""What near drafters draft must promise so many tokens more than what it replaces, of each request:
the most promising of many drafts promises too much, and some of its tokens would have been cheap
later. Trees of a working drafter must promise so many more than none."""
FEW, SAMPLES, STALE, RENEW = 3, 25, 1024, 8
"""For each number of rows: at least FEW steps tell its cost; the seconds of the last SAMPLES are
kept, and count for STALE steps after the last; costs are computed anew every RENEW steps."""
MOVE, RETURN = 1.07, 0.999
"""Of `Experience.level`, how many times as long as usual all steps take now, as after long texts: a
step moves it by a factor of MOVE at most, however long it took, and the power RETURN draws it back
to 1. (A mean would move further with steps that were disturbed than with others, and drift.)"""
SIZES = tuple(sorted({2**n for n in range(14)} | {3 * 2**n for n in range(12)}))
"""Numbers of rows that costs are told apart by, and widths of trees that are considered."""
Pair = tuple[float, float]
Evidence = dict[tuple[str, str], Pair]
"""Pairs as in `MOST`, by kind and drafter (of `PACE` `NEAR` or ""), recent ones counting more."""


class Episode:
    """One answer in the making. tokens: of its prompt, apart from their order; own: what was found
    in it; all: the same, and what was found in others like it.

    >>> before, after = Episode([1, 2, 3]), Episode([1, 2, 4])
    >>> before.add(CLAIMS, "lookup", 10, 3)
    >>> after.follow([before])
    >>> after.add(CLAIMS, "lookup", 2, 2)
    >>> after.all[CLAIMS, "lookup"], after.own[CLAIMS, "lookup"]
    ((11.8, 4.94), (2.0, 2.0))
    """

    def __init__(self, tokens: Iterable[int]):
        self.tokens = frozenset(tokens)
        self.own: Evidence = {}
        self.all: Evidence = {}

    def follow(self, others: Reversible["Episode"]) -> None:
        """Begin with what the most similar of these found, of equally similar ones the last."""
        for other in nlargest(NEIGHBOURS, reversed(others), key=self.alike):
            weight = min(1.0, self.alike(other) / ALIKE) ** 2
            for key, pair in other.own.items():
                self.all[key] = _added(self.all.get(key), weight * pair[0], weight * pair[1])
        for (kind, name), (of, came) in self.all.items():
            part = min(1.0, MOST[kind] / of) if of else 1.0
            self.all[kind, name] = part * of, part * came

    def alike(self, other: "Episode") -> float:
        """The tokens that both prompts have, as a part of those that one of them has."""
        both = len(self.tokens & other.tokens)
        return both / max(1, len(self.tokens) + len(other.tokens) - both)

    def add(self, kind: str, name: str, of: float, came: float) -> None:
        for evidence in (self.own, self.all):
            evidence[kind, name] = _added(evidence.get((kind, name)), of, came, MEMORY)

    def trust(self, name: str) -> float:
        """What part of the tokens that a near drafter claims should be right."""
        claimed, right = self.all.get((CLAIMS, name), (0.0, 0.0))
        return (right + TRUST) / (claimed + TRUST)

    def gains(self, name: str) -> float:
        """Drafted tokens expected to be right in a tree of two nodes; a tree of g nodes has
        log2(g) times as many right, as calibrations find."""
        logs, right = self.all.get((TREES, name), (0.0, 0.0))
        return (right + HOPE) / (logs + HOPE)

    def saves(self, name: str) -> float:
        """Seconds that a look at a near drafter saves; infinite where little is known."""
        looks, saved = self.all.get((LOOKS, name), (0.0, 0.0))
        return saved / looks if looks >= SURE else float("inf")

    def pace(self, steady: float) -> float:
        """Tokens a second, where all steps without near drafters have `steady`."""
        tokens, seconds = self.all.get((PACE, NEAR), (0.0, 0.0))
        others = self.all.get((PACE, ""), (0.0, 0.0))[1]
        return (tokens + steady * others) / (seconds + others) if seconds + others else steady


def _added(before: Pair | None, of: float, came: float, memory: float = 1.0) -> Pair:
    known, known_came = before or (0.0, 0.0)
    return memory * known + of, memory * known_came + came


class Experience:
    """What drafts were worth so far, and what steps cost.

    past: the last answers; passing: steps whose seconds are still to be taken up; seconds: of
    recent steps, by kind and number of rows, and costs: what they come to, by both; host: seconds a
    step on the host, by drafter; last: who was chosen last; level: how many times as long as usual
    steps take now.

    >>> record = Experience()
    >>> for rows, seconds in ((1, 1.0), (4, 2.0), (1, 1.0), (1, 1.0)):
    ...     record.passed("plain", rows, seconds)
    >>> now = record.opened([[1, 2, 3]])
    >>> sure, unsure = Draft.chain([7, 1, 2, 3], [1, 0.9, 0.8, 0.7]), Draft.chain([7, 1], [1, 0.7])
    >>> record.choice(now, {"lookup": [sure]}, [], 12)[:2]
    ('near', 4)
    >>> record.choice(now, {"lookup": [unsure]}, [], 12)[:2]
    ('near', 2)
    >>> for _ in range(50):
    ...     now[0].add(CLAIMS, "lookup", 2.4, 0)
    >>> record.choice(now, {"lookup": [sure]}, [], 12)[:2]
    ('plain', 1)
    """

    def __init__(self):
        self.past: deque[Episode] = deque(maxlen=KEPT)
        self.passing: list[tuple[int, str, int, float]] = []
        self.seconds: dict[str, dict[int, Recent]] = {}
        self.costs: dict[tuple[str, int], float] = {}
        self.host: dict[str, float] = {}
        self.steps, self.last, self.level = 0, "", 1.0

    def opened(self, prompts: Iterable[Sequence[int]]) -> list[Episode]:
        """Answers to these prompts begin."""
        episodes = [Episode(prompt) for prompt in prompts]
        past = list(self.past)  # other threads may begin answers, too
        for episode in episodes:
            episode.follow(past)
        self.past += episodes
        self.last = ""
        return episodes

    def pays(self, name: str, episodes: list[Episode]) -> bool:
        """Whether looking at a near drafter saves at least the time it takes, or may."""
        return sum(each.saves(name) for each in episodes) >= self.host.get(name, 0.0)

    @property
    def glances(self) -> bool:
        """Whether at the next step all near drafters draft."""
        return self.steps % GLANCE == 0

    def spent(self, spent: dict[str, float]) -> None:
        """Drafters took so many seconds on the host, of one step."""
        for name, seconds in spent.items():
            self.host[name] = 0.9 * self.host.get(name, seconds) + 0.1 * seconds

    def passed(self, name: str, rows: int, seconds: float) -> None:
        """A step of so many rows took so long; name: of the working drafter, or `NONE`."""
        self.steps += 1
        self.passing.append((self.steps, name, rows, seconds))

    def choice(
        self,
        episodes: list[Episode],
        drafts: dict[str, list[Draft]],
        working: Iterable[str],
        budget: int,
        begun: tuple[str, int] | None = None,
    ) -> tuple[str, int, list[Draft]]:
        """Who drafts next, how many nodes of each tree are verified at most, and these trees, where
        near drafters draft. drafts: theirs, by name, one for each request; begun: a working drafter
        that drafts already, and its nodes."""
        if self.last == NONE and not drafts and not self.glances:  # hardly more is known
            return NONE, 1, []
        self.look_back()
        requests = len(episodes)
        own = self.seconds.get(NONE, {}).get(_size(requests))
        if own is None or not own.tells(self.steps):
            return *(begun or (NONE, 1)), []
        promised = {(NONE, 1): (requests, self._cost(NONE, requests))}
        for name in working:
            gains = sum(each.gains(name) for each in episodes)
            for width in sizes_up_to(budget)[1:]:
                cost = self._cost(name, requests * width)
                promised[name, width] = requests + gains * log2(width), cost
        steady = max(tokens / cost for tokens, cost in promised.values()) / self.level / requests
        pace = self.level * sum(each.pace(steady) for each in episodes)
        found = {key: tokens - pace * cost for key, (tokens, cost) in promised.items()}
        best = begun or max(found, key=found.__getitem__)
        if not begun and found[best] < found[NONE, 1] + WORKING_MARGIN * requests:
            best = NONE, 1
        # The quickest to look is credited first: another one with the same draft saves nothing, nor
        # does a draft that is not worth verifying.
        near, most = [], found[best] + MARGIN * requests
        worker = begun[0] if begun else NONE  # which takes its time whatever is verified
        for name in sorted(drafts, key=lambda name: self.host.get(name, 0.0)):
            before, pairs = most, zip(episodes, drafts[name], strict=True)
            more = [draft.believed(episode.trust(name)) for episode, draft in pairs]
            pairs = zip(near, more, strict=True)
            near = [known.merged(draft, budget) for known, draft in pairs] if near else more
            sums = [[*accumulate(draft.confidences[1:], initial=0.0)] for draft in near]
            for width in sizes_up_to(max(map(len, sums)))[1:]:
                tokens = requests + sum(each[min(width, len(each)) - 1] for each in sums)
                worth = tokens - pace * self._cost(worker, requests * width)
                if worth > most:
                    best, most = (NEAR, width), worth
            saved = self.level * (most - before) / pace / requests
            for episode in episodes:
                episode.add(LOOKS, name, 1, saved)
        self.last = best[0]
        return *best, near

    def look_back(self) -> None:
        """Take up what the last steps took."""
        for step, name, rows, seconds in self.passing:
            kept, size = self.seconds.setdefault(name, {}), _size(rows)
            if size not in kept:
                kept[size] = Recent()
            else:
                longer = seconds / kept[size].median / self.level
                self.level = (self.level * max(1 / MOVE, min(longer, MOVE))) ** RETURN
            kept[size].add(seconds / self.level, step)
            if len(kept[size].seconds) == FEW or step % RENEW == 0:
                self.costs.clear()
        self.passing.clear()

    def _cost(self, name: str, rows: int) -> float:
        """Seconds of a step: between what was measured lately, and beyond it what most rows took,
        so that more will be tried. A step never costs more than one of more rows."""
        if (name, rows) not in self.costs:
            own = sorted(self.seconds.get(name, {}).items())
            known = [(SIZES[size], each.median) for size, each in own if each.tells(self.steps)]
            if not known:
                return 0.0 if name == NONE else self._cost(NONE, rows)
            sizes, medians = zip(*known, strict=True)
            seconds = [*accumulate(medians[::-1], min)][::-1]
            self.costs[name, rows] = float(np.interp(rows, sizes, seconds))
        return self.costs[name, rows]


class Recent:
    """seconds: of the last steps of a size, and their median; last: the number of the last one."""

    def __init__(self):
        self.seconds: deque[float] = deque(maxlen=SAMPLES)
        self.median, self.last = 0.0, 0

    def tells(self, step: int) -> bool:
        """Whether they are enough, and recent enough."""
        return len(self.seconds) >= FEW and self.last > step - STALE

    def add(self, seconds: float, step: int) -> None:
        self.seconds.append(seconds)
        self.median, self.last = sorted(self.seconds)[len(self.seconds) // 2], step


@cache
def sizes_up_to(most: int) -> tuple[int, ...]:
    """Sizes of trees to choose from.

    >>> sizes_up_to(10), sizes_up_to(1)
    ((1, 2, 3, 4, 6, 8, 10), (1,))
    """
    return tuple(sorted({min(most, size) for size in SIZES[: _size(most) + 1]}))


def _size(rows: int) -> int:
    """The place in `SIZES`.

    >>> [SIZES[_size(rows)] for rows in (1, 4, 5, 7, 13, 10_000)]
    [1, 4, 6, 8, 16, 8192]
    """
    return min(bisect_left(SIZES, rows), len(SIZES) - 1)
