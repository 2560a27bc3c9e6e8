"""Trees that shrink as the batch grows, down to plain decoding where drafting would not pay: of a
few sizes the one with the most tokens a second. docs/serving.md tells how these are known.

Where nothing is drafted nothing is learned, so a tree is tried now and then.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product
from math import log2

import numpy as np

from slipstream.core.device import wait_for
from slipstream.core.sampling import Sampling
from slipstream.core.trees import Trees
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.request import Answering, Batch
from slipstream.drafters.base import Verified
from slipstream.drafters.experience import sizes_up_to

PRIOR, WEIGHT = 0.5, 200.0
"""The gain before anything was verified, and how many logarithms of nodes it counts like."""
MEMORY = 1000.0
"""Earlier trees fade once the logarithms of their nodes add up to more than this."""
TRIAL, TRIED, PAYS = 512, 2, 1.1
"""Where plain decoding is chosen, after TRIAL steps TRIED draft the smallest tree; PAYS: how many
times plain decoding's rate a tree must promise to be chosen, since its gain is less certain."""
PROMPT, STEPS = 48, 4
"""Tokens of the prompts that costs are measured with; steps of each, the first not counted."""
NEWEST, OUTLIER = 0.05, 3.0
"""Weight of a new step in the moving mean of the time steps take over what was measured; at most
OUTLIER times as long counts, so that a pause of the machine does not distort it."""


class AdaptingEngine(Engine):
    """An engine whose trees have up to `budget` nodes, as few as the number of requests asks for.

    costs: seconds of a step by its number of requests and the nodes of each tree; empty until they
    are measured, and then the budget holds. slower: how many times as long steps of so many
    requests, with drafts or without, have taken lately.
    """

    def __init__(self, target, drafter, sampling: Sampling, limits: Limits, budget: int):
        super().__init__(target, drafter, sampling, limits, budget)
        self.sizes = sizes_up_to(budget)
        self.costs: dict[int, dict[int, float]] = {}
        self.slower: dict[tuple[int, bool], float] = {}
        self.gained, self.weight = PRIOR * WEIGHT, WEIGHT
        self.steps = 0
        self._fixed: int | None = None

    def allowed(self, count: int) -> int:
        if self._fixed is not None or not self.costs:
            return self._fixed or self.budget
        rates = {size: self.tokens(size) / self.seconds(count, size) for size in self.sizes}
        best = max(rates, key=rates.get)
        if rates[best] > PAYS * rates[1]:
            return best
        return 1 if self.steps % (TRIAL + TRIED) < TRIAL else self.sizes[1]

    def starting(self, requests: Sequence[Answering], rows: int) -> Iterator[None]:
        yield from super().starting(requests, rows)
        if self._requests:  # trees were drafted for fewer; the likeliest nodes come first
            allowed = self.allowed(len(self._requests))
            self.running.trees = self.running.trees.first(allowed)

    def widths(self, width: int) -> int:
        return self.sizes[bisect_left(self.sizes, width)]

    def tokens(self, size: int) -> float:
        """Tokens of a step for each request, with trees of `size` nodes."""
        return 1 + self.gained / self.weight * log2(size)

    def seconds(self, count: int, size: int) -> float:
        """Seconds of a step: as measured, corrected by what such steps have taken since."""
        return self.slower.get((_about(count), size > 1), 1.0) * self._measured(count, size)

    def _measured(self, count: int, size: int) -> float:
        """Seconds of a step, on a line between the counts that were measured."""
        counts = list(self.costs)
        seconds = np.interp(count, counts, [self.costs[each][size] for each in counts])
        return float(seconds) * max(1.0, count / counts[-1])

    def _step(self, batch: Batch) -> None:
        requests, width, started = list(batch.requests), batch.trees.width, time.perf_counter()
        super()._step(batch)
        self.steps += 1
        if width > 1:
            self.gained += sum(request.accepted[-1] for request in requests)
            self.weight += len(requests) * log2(width)
            fade = min(1.0, MEMORY / self.weight)
            self.gained, self.weight = self.gained * fade, self.weight * fade
        # Costs are of steps that verify trees of a size and draft such ones.
        if self.costs and width in self.sizes and width == batch.trees.width:
            seconds, kind = time.perf_counter() - started, (_about(len(requests)), width > 1)
            longer = min(OUTLIER, seconds / self._measured(len(requests), width))
            known = self.slower.get(kind, 1.0)
            self.slower[kind] = known + NEWEST * (longer - known)

    def _begin_next(self, batch: Batch, verified: Verified) -> None:
        if self._fixed is None:  # what is measured is one step
            super()._begin_next(batch, verified)

    def measure(self, most: int) -> None:
        """Measure the costs of steps of up to `most` requests, on prompts that mean nothing."""
        known = self.gained, self.weight
        counts = sorted({1 << n for n in range(most.bit_length())} | {most})
        timed = {count: self._timed(count) for count in reversed(counts)}  # buffers grow once
        self.costs = {count: timed[count] for count in counts if timed[count]}
        self.gained, self.weight = known
        self._fixed, self.running = None, None
        self.attached.forget()

    def _timed(self, count: int) -> dict[int, float]:
        """Fewest seconds of a step with trees of each size; none where the target's context has no
        room for all steps."""
        length = max(1, min(PROMPT, self.target.max_positions // 4))
        most, size = (1 + STEPS * len(self.sizes)) * self.budget + 1, self.target.vocab_size
        limits = Limits(most, (), frozenset())
        prompts = [[(place + each) % size for place in range(length)] for each in range(count)]
        self._fixed, self.running = 1, None
        self.start([self.request(own, limits=limits, sampling=Sampling()) for own in prompts])
        seconds: dict[int, list[float]] = {size: [] for size in self.sizes}
        depth = 0  # of trees, once some have been drafted
        for turn, size in product(range(STEPS), self.sizes):
            if min((each.room for each in self._requests), default=0) <= self.budget:
                break
            # A step verifies trees of one size and drafts such ones; plain decoding drafts none.
            self.running.trees = Trees.roots(self.running.trees.tokens[:, 0]).padded(size)
            self.running.trees.depth = min(depth, size - 1)
            wait_for(self.target.device)
            self._fixed, started = size, time.perf_counter()
            self.step()
            wait_for(self.target.device)  # for the next drafts, too
            depth = max(depth, self.running.trees.depth if self.running else 0)
            if turn:
                seconds[size].append(time.perf_counter() - started)
        return {size: min(own) for size, own in seconds.items()} if all(seconds.values()) else {}

    @property
    def _requests(self) -> list[Answering]:
        return [] if self.running is None else self.running.requests


def _about(count: int) -> int:
    """Numbers of requests that are told apart: 1, 2, 3 and 4, 5 to 8, and so on.

    >>> [_about(count) for count in (1, 2, 3, 4, 5, 8, 9)]
    [0, 1, 2, 2, 3, 3, 4]
    """
    return (count - 1).bit_length()
