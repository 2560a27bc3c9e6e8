"""How many nodes a draft should have on this device, with this model and this drafter.

A few prompts are decoded with trees of several sizes g. Seconds of a step s(g) and tokens of a step
tau(g) are fitted, which gives the size g* with the most tokens a second. Source: UNISPEC, section
3, "Device-aware calibration"; s(g) is the whole step here, drafting included, so that it holds for
drafters that take time, too. Then g*, the best size measured and plain decoding are measured once
more, and the fastest of them is chosen (`calibrated.py` keeps the choice).
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import product

import numpy as np
from rich.progress import track

from slipstream.core.errors import InputError
from slipstream.core.resuming import Part
from slipstream.core.sampling import Sampling
from slipstream.core.settings import Count, Positive, Settings
from slipstream.decoding.answer import Limits
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.base import Attached
from slipstream.targets.target import Target

DEGREE, KNOTS = 2, 8
"""Degree, and number of knots, of the spline that is fitted to the seconds of a step."""
POWER = 3
"""Degree of the polynomial that is fitted to the tokens of a step."""
BEYOND, WIDEST = 1.5, 512
"""While the largest size measured is the best, one so many times as large is tried, up to this."""
Size = tuple[str, int]
"""A way to draft, and a number of nodes."""
DRIFT, STEPS_TO_JUDGE = 0.25, 64
"""Reported: STEPS_TO_JUDGE steps whose time is off the calibrated one by more than this share."""


@dataclass(frozen=True)
class Point:
    """What decoding with trees of `budget` nodes was like: seconds and tokens of a step."""

    budget: int
    seconds: float
    tau: float

    @property
    def rate(self) -> float:
        """Tokens a second, the prefill left out."""
        return self.tau / self.seconds


@dataclass(frozen=True)
class Curve:
    """One way to draft: its measured points and the curves through them."""

    points: tuple[Point, ...]

    def seconds(self, budgets: np.ndarray) -> np.ndarray:
        """Fitted seconds of a step: a spline of degree 2 with 8 knots among the sizes measured, or
        lines from one to the next where these are too few to be smoothed: costs rise in steps."""
        measured, seconds = self._column("budget"), self._column("seconds")
        if len(measured) < KNOTS + DEGREE:
            return np.interp(budgets, measured, seconds)
        from scipy.interpolate import LSQUnivariateSpline  # most of a second

        # Knots where the points are, so that each piece of the spline has some.
        knots = np.quantile(measured, np.linspace(0, 1, KNOTS))[1:-1]
        return LSQUnivariateSpline(measured, seconds, knots, k=DEGREE)(budgets)

    def tau(self, budgets: np.ndarray) -> np.ndarray:
        """Fitted tokens of a step: a cubic polynomial of log g (UNISPEC: of g, which misses the
        steep beginning: by 14 % at 2 nodes where tau is 3.5 - 2.5 / sqrt(g))."""
        sizes, power = np.log(self._column("budget")), min(POWER, len(self.points) - 1)
        return np.polyval(np.polyfit(sizes, self._column("tau"), power), np.log(budgets))

    def at(self, budget: int) -> Point:
        """Seconds and tokens of a step, as fitted."""
        place = np.asarray(float(budget))
        return Point(budget, float(self.seconds(place)), float(self.tau(place)))

    def best(self) -> Point:
        """The size of the highest fitted rate, of all between the smallest and the largest."""
        measured = [point.budget for point in self.points]
        sizes = np.arange(min(measured), max(measured) + 1)
        rates = self.tau(sizes) / self.seconds(sizes)
        return self.at(int(sizes[rates.argmax()]))

    def _column(self, name: str) -> np.ndarray:
        return np.array([getattr(point, name) for point in self.points], dtype=float)


@dataclass(frozen=True)
class Calibration(Settings):
    """The best of some ways to draft. way: its name; budget: its nodes, 1 where plain decoding is
    best; seconds: of its step; speedup: over plain decoding, whose step takes `plain_seconds`;
    points: what was measured, by way."""

    way: str
    budget: Count
    seconds: Positive
    speedup: Positive
    plain_seconds: Positive
    points: dict[str, list[Point]]

    @property
    def plain(self) -> bool:
        return self.budget == 1

    @property
    def choice(self) -> str:
        """What decodes, in words."""
        return "plain" if self.plain else f"{self.budget} nodes, {self.way}"


def calibrate(
    target: Target,
    drafters: dict[str, Attached],
    prompts: list[list[int]],
    sampling: Sampling,
    limits: Limits,
    budgets: list[int],
    repeats: int,
) -> Calibration:
    """Decode `prompts` with every drafter and budget, and plainly, `repeats` times; while the
    largest size is the best, larger ones follow; then the best ones once more, which decides.
    Raises `InputError` for budgets that are not ascending, or below 2."""
    if not budgets or min(budgets) < 2 or sorted(set(budgets)) != list(budgets):
        raise InputError("calibration.budgets: give sizes of at least 2, in ascending order")
    points: dict[str, list[Point]] = {way: [] for way in drafters}
    plain: Point | None = None

    def measure(sizes: Iterable[Size]) -> dict[Size, Point]:
        """What they are like, in seconds of the first round."""
        nonlocal plain
        decoders: dict[Size, Decoder] = {
            (way, budget): Engine(target, drafters[way], sampling, limits, budget)
            for way, budget in sizes
        }
        decoders["plain", 1] = undrafted(target, next(iter(drafters.values())), sampling, limits)
        found = measured(decoders, prompts, repeats)
        now = point_of(1, found.pop(("plain", 1)))
        plain = plain or now
        made = {size: point_of(size[1], each) for size, each in found.items()}
        pace = plain.seconds / now.seconds
        return {size: replace(each, seconds=each.seconds * pace) for size, each in made.items()}

    asked = list(product(drafters, budgets))
    while asked:
        for (way, _), point in measure(asked).items():
            points[way].append(point)
        asked = [(way, larger) for way in dict(asked) if (larger := _beyond(points[way]))]
    return chosen(points, plain, measure(candidates(points)))


def undrafted(target: Target, drafter: Attached, sampling: Sampling, limits: Limits) -> Decoder:
    """What drafting is compared with: plain decoding, or of a target that the drafter was
    fine-tuned with, its own decoding without drafts."""
    if drafter.target is target:
        return PlainDecoder(target, sampling, limits)
    return Engine(target, drafter, sampling, limits, budget=1)


def _beyond(points: list[Point]) -> int | None:
    """The next larger size to try, None where the largest was not the fastest, or is the widest."""
    largest = points[-1]
    if largest.budget >= WIDEST or any(each.rate >= largest.rate for each in points[:-1]):
        return None
    return min(WIDEST, round(BEYOND * largest.budget))


def candidates(points: dict[str, list[Point]]) -> list[Size]:
    """The fastest size as fitted and the fastest as measured: what a fit says between the points
    may be wrong, and the best of many measured sizes was lucky, too."""
    way, best = fastest(points)
    rates = {(name, each.budget): each.rate for name, own in points.items() for each in own}
    return sorted({(way, best.budget), max(rates, key=rates.get)})


def chosen(points: dict[str, list[Point]], plain: Point, again: dict[Size, Point]) -> Calibration:
    """The fastest of the sizes that were measured once more, or plain decoding."""
    (way, _), best = max(again.items(), key=lambda each: each[1].rate)
    if best.rate <= plain.rate:
        way, best = "plain", plain
    speedup = best.rate / plain.rate
    return Calibration(way, best.budget, best.seconds, speedup, plain.seconds, points)


def fastest(points: dict[str, list[Point]]) -> tuple[str, Point]:
    """The way and the size of the highest fitted rate."""
    best = {way: Curve(tuple(own)).best() for way, own in points.items()}
    return max(best.items(), key=lambda each: each[1].rate)


def measured(
    decoders: dict[Size, Decoder], prompts: list[list[int]], repeats: int
) -> dict[Size, list[Statistics]]:
    """Each decoder's statistics by prompt, summed over repeats, after a warm-up; interleaved prompt
    by prompt, but where a drafter learns from its answers, which it then does from all prompts in
    turn, pass by pass."""
    found = {key: [Statistics() for _ in prompts] for key in decoders}
    compiled = any(decoder.target.compiled for decoder in decoders.values())
    # Twice, since buffers that grow for one of them forget the graphs of those before.
    for decoder in [*decoders.values()] * (1 + compiled):
        # Compiled steps wait for the first rows of each shape.
        for prompt in prompts if decoder.target.compiled else prompts[:1]:
            decoder.generate(prompt)
    # What one size has taught a drafter, which serves them all, the next one does not find.
    engines = [decoder for decoder in decoders.values() if isinstance(decoder, Engine)]
    learns, last = any(engine.attached.learns for engine in engines), len(prompts) - 1
    asked, kept = list(enumerate(prompts)), Part(prompts)
    order = (decoders.items(), asked) if learns else (asked, decoders.items())
    for seed, *turn in track(list(product(range(repeats), *order)), "calibrating"):
        (key, decoder), (place, prompt) = turn if learns else reversed(turn)

        def took(decoder=decoder, prompt=prompt, seed=seed, first=place == 0) -> dict:
            if isinstance(decoder, Engine) and (first or not learns):
                decoder.attached.forget()
            return asdict(decoder.generate(prompt, seed).statistics)

        anew = learns and not kept.has(seed, last, *key)
        found[key][place] += Statistics(**kept.kept((seed, place, *key), took, anew))
    return found


def point_of(budget: int, statistics: list[Statistics]) -> Point:
    total = sum(statistics, Statistics())
    return Point(budget, total.step_seconds, total.tau)


class Drift:
    """Notices, once, that some `STEPS_TO_JUDGE` steps took another time than was calibrated."""

    def __init__(self, expected: float):
        self.expected, self.recent, self.noticed = expected, Statistics(), False

    def watch(self, statistics: list[Statistics]) -> None:
        self.recent = sum(statistics, self.recent)
        if self.noticed or self.recent.target_forwards < STEPS_TO_JUDGE:
            return
        seconds, self.recent = self.recent.step_seconds, Statistics()
        change = seconds / self.expected - 1
        if abs(change) > DRIFT:
            self.noticed = True
            print(
                f"note: a step takes {1000 * seconds:.1f} ms, {abs(change):.0%} "
                f"{'more' if change > 0 else 'less'} than when it was calibrated; run with "
                "calibrate=true again"
            )
