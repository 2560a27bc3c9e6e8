"""All that chance can do, exactly: the space of the uniform numbers, cell by cell.

Decoding depends on a uniform number only through the intervals, between the breakpoints of the
distributions it is compared with, that the number lies in. A run notes these breakpoints, so it
stands for a whole cell of numbers; the space around the cell is run in turn. Runs may be requests
of one batch: their numbers are told apart by their values.
"""

from collections.abc import Callable
from functools import cache
from math import prod
from typing import ClassVar

import pytest
import torch

from slipstream.core import sampling, verification
from slipstream.decoding import decoder, engine
from slipstream.drafters import draft_model, drawn_streams

Axis = tuple[str, int]
Box = dict[Axis, tuple[float, float]]
NUMBERS = 64
NARROWEST = 1e-15


def _share(number: int) -> float:
    """Where in its interval the value of an axis lies, so that no two are the same."""
    return 0.3 + 0.4 * ((number + 1) * 0.6180339887498949 % 1)


# The numbers of the places of an answer, as long as nothing is known of them.
NAMES = ["decide", *(f"keep {rank}" for rank in range(sampling.SIBLINGS))]
PLACES = [(name, place) for place in range(NUMBERS) for name in NAMES]
APART = 2 * len(PLACES)
"""So many numbers has each of the runs that go on together."""


@cache
def _free(slot: int) -> tuple[dict[Axis, float], dict[float, Axis], torch.Tensor]:
    """The numbers of one of the runs that go on together: by axis, by value, as a table."""
    free = {axis: _share(number + slot * APART) for number, axis in enumerate(PLACES)}
    table = torch.tensor(list(free.values()), dtype=torch.float64).view(NUMBERS, len(NAMES))
    return free, {value: axis for axis, value in free.items()}, table


class EnumeratedChance:
    """A `Chance` whose numbers lie in a box; notes the breakpoints they were compared with.

    fixed: numbers that are given; values: of the axes that are not free, or were asked for; slot:
    the place among the runs that go on together; deaf: what comes from now on does not matter.
    """

    current: ClassVar[list["EnumeratedChance"]] = []

    def __init__(self, box: Box, fixed: dict[Axis, float], slot: int = 0):
        self.box, self.fixed, self.slot = box, fixed, slot
        self.cuts: dict[Axis, set[float]] = {}
        self.values: dict[Axis, float] = {}
        self.axes: dict[float, Axis] = {}
        self.drafted, self.deaf = 0, False
        self.free, self.known, table = _free(slot)
        table = table.clone()
        for axis in box.keys() | fixed.keys():
            if axis in self.free:
                table[axis[1], NAMES.index(axis[0])] = self.value(axis)
        self.decide, self.keep = table[:, 0], table[:, 1:]

    def value(self, axis: Axis) -> float:
        """A number within the box, told apart from those of other axes."""
        if axis in self.fixed:
            return self.fixed[axis]
        low, high = self.box.get(axis, (0.0, 1.0))
        number = self.slot * APART + len(PLACES) + len(self.values)
        value = low + _share(number) * (high - low)
        self.values[axis], self.axes[value] = value, axis
        return value

    def number(self) -> torch.Tensor:
        self.drafted += 1
        return torch.tensor(self.value(("draft", self.drafted)), dtype=torch.float64)

    def numbers(self, count: int) -> torch.Tensor:
        return torch.stack([self.number() for _ in range(count)])

    def draw(self, probabilities: torch.Tensor) -> int:
        return int(sampling.draw(probabilities, self.number()))

    def accept(self, probability: float) -> bool:
        number = float(self.number())
        self.compared(number, [probability])
        return number < probability

    def compared(self, number: float, breakpoints: list[float]) -> None:
        axis = self.axes.get(number, self.known.get(number))
        if axis is not None and axis not in self.fixed and not self.deaf:
            self.cuts.setdefault(axis, set()).update(breakpoints)


def enumerated(
    outcome_of: Callable[[EnumeratedChance], tuple], fixed: dict[Axis, float] | None = None
) -> dict[tuple, float]:
    """Outcome -> probability, over everything that chance can do."""
    return enumerated_together(lambda chances: [outcome_of(*chances)], fixed, 1)


def enumerated_together(
    outcomes_of: Callable[[list[EnumeratedChance]], list[tuple]],
    fixed: dict[Axis, float] | None,
    most: int,
) -> dict[tuple, float]:
    """As `enumerated`, of up to `most` runs that go on together."""
    distribution: dict[tuple, float] = {}
    waiting: list[Box] = [{}]
    while waiting:
        boxes, waiting = waiting[-most:], waiting[:-most]
        chances = [EnumeratedChance(box, fixed or {}, slot) for slot, box in enumerate(boxes)]
        EnumeratedChance.current = chances
        for chance, outcome in zip(chances, outcomes_of(chances), strict=True):
            cell = dict(chance.box)
            for axis, cuts in chance.cuts.items():
                free = chance.free.get(axis)
                (low, high), value = cell.get(axis, (0.0, 1.0)), chance.values.get(axis, free)
                below = max((cut for cut in cuts if low < cut <= value), default=low)
                above = min((cut for cut in cuts if value < cut < high), default=high)
                for part in ((low, below), (above, high)):
                    if part[1] - part[0] > NARROWEST:
                        waiting.append({**cell, axis: part})
                cell[axis] = below, above
            volume = prod(high - low for low, high in cell.values())
            distribution[outcome] = distribution.get(outcome, 0.0) + volume
    EnumeratedChance.current = []
    assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-12)
    return distribution


def _note(probabilities: torch.Tensor, points: torch.Tensor) -> None:
    """Breakpoints of (M, V) distributions that (M,) points are compared with."""
    if not EnumeratedChance.current:
        return
    cumulative = probabilities.double().cumsum(-1)
    breakpoints = (cumulative / cumulative[:, -1:]).tolist()
    for point, own in zip(points.tolist(), breakpoints, strict=True):
        for chance in EnumeratedChance.current:
            chance.compared(point, own)


@pytest.fixture
def chance(monkeypatch):
    """An `EnumeratedChance` may be handed in as the seed of a request."""
    draw, follow, keeps, made = (
        sampling.draw,
        verification.follow,
        verification.keeps,
        sampling.Chance,
    )
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def noted_draw(probabilities, points):
        if probabilities.ndim == 3 and probabilities.shape[1] > 1:
            waiting[:] = [(probabilities, points)]  # of these, only the nodes of the path matter
        else:
            _note(probabilities.reshape(-1, probabilities.shape[-1]), points.reshape(-1))
        return draw(probabilities, points)

    def noted_follow(trees, choices):
        last = follow(trees, choices)
        while waiting:
            probabilities, points = waiting.pop()
            on_path = trees.ancestors[torch.arange(len(last)), last]
            _note(probabilities[on_path], points[on_path])
        return last

    def noted_keeps(points, ratios, trying):
        for chance in EnumeratedChance.current:
            for point, ratio in zip(points[trying].tolist(), ratios[trying].tolist(), strict=True):
                chance.compared(point, [ratio])
        return keeps(points, ratios, trying)

    for module in (sampling, verification, draft_model, drawn_streams):
        monkeypatch.setattr(module, "draw", noted_draw)
    for module in (verification, engine):
        monkeypatch.setattr(module, "follow", noted_follow)
    monkeypatch.setattr(verification, "keeps", noted_keeps)
    monkeypatch.setattr(
        decoder,
        "Chance",
        lambda seed, count: made(seed, count) if isinstance(seed, int) else seed,
    )


def fixed_first(target, prompt: list[int], settings, token: int) -> dict[Axis, float]:
    """The first token of every answer to `prompt` is `token`."""
    with torch.no_grad():
        ids = torch.tensor([prompt], device=target.device)
        positions = torch.arange(len(prompt), device=target.device)[None]
        rows = target.forward(ids, positions, None, None)
        probabilities = settings.probabilities(target.logits(rows.hidden[0, -1]))
    cumulative = probabilities.cumsum(-1)
    return {("decide", 0): float(cumulative[token] - probabilities[token] / 2)}
