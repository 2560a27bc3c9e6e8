"""Calibrated draft sizes against a search of sizes (UNISPEC, Figures 5 and 6, Tables 13 and 15 to
17)."""

from collections.abc import Sequence

import numpy as np

from slipstream.core.errors import InputError
from slipstream.core.settings import Budget, Count
from slipstream.decoding.calibration import (
    Curve,
    calibrate,
    candidates,
    fastest,
    measured,
    point_of,
)
from slipstream.decoding.engine import Engine
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.base import Drafter
from slipstream.evaluation.metrics import rate_interval
from slipstream.results.record import bounded
from studies import Plot, Prompt, Result, Target
from studies.decoding import GREEDY, LIMITS, divided, speed_ratio, token_ids

AROUND, SIZES = "Sizes around g* (Table 13)", "Tokens a second by size"
SAMPLES, DRAWS = "Numbers of calibration prompts (Figure 6)", 200
"""Title of a table, and how often prompts are drawn for each of its rows."""


def draft_size(
    target: Target,
    prompts: list[Prompt],
    drafters: dict[str, Drafter],
    budgets: Sequence[Budget],
    step: Count,
    deviations: Sequence[Count],
    usual: dict[str, Budget],
    calibration_prompts: Count,
    sample_sizes: Sequence[Count],
    repeats: Count,
) -> Result:
    """Each of `drafters` is calibrated with the sizes `budgets` on `calibration_prompts` prompts;
    then sizes from the smallest to the largest, in steps of `step`, decode the others.
    deviations: nodes that the draft is made larger and smaller than g*; usual: by drafter, the size
    that its paper has, if that is to be tried, too; sample_sizes: numbers of prompts, drawn from
    the others, whose measurements of `budgets` are calibrated with as well; repeats: how often each
    prompt is decoded."""
    if unknown := set(usual) - set(drafters):
        raise InputError(
            f"study.usual: there is no drafter {', '.join(sorted(unknown))}; name some of "
            + ", ".join(drafters)
        )
    warm_up, others = (token_ids(target, part) for part in divided(prompts, calibration_prompts))
    if (most := max(sample_sizes, default=0)) > len(others):
        raise InputError(
            f"study.sample_sizes: {most} is more than the {len(others)} prompts to be measured; "
            "lower it, or give more num_prompts"
        )
    searched = sorted({*range(budgets[0], budgets[-1], step), budgets[-1]})
    searched = sorted({*searched, *budgets}) if sample_sizes else searched
    rows, around, sampled, sizes = [], [], [], []
    for name, drafter in drafters.items():
        ways = drafter.variants(drafter.attach(target))
        found = calibrate(target, ways, warm_up, GREEDY, LIMITS, budgets, repeats)
        way, fitted = fastest(found.points)
        if not found.plain:  # what was measured once more decides
            way = found.way
            fitted = Curve(tuple(found.points[way])).at(found.budget)
        own = fitted.budget
        near = {own} | {own + sign * each for each in deviations for sign in (-1, 1)}
        near = sorted(size for size in near if size >= 2)
        tried = sorted({*searched, *near, usual.get(name, own)})
        engines = {("", g): Engine(target, ways[way], GREEDY, LIMITS, g) for g in tried}
        grid = {g: each for (_, g), each in measured(engines, others, repeats).items()}
        points = {g: point_of(g, each) for g, each in grid.items()}
        against = {g: speed_ratio(each, grid[own], False) for g, each in grid.items()}
        best = max({*searched, own}, key=lambda g: points[g].rate)
        ratio, low, high = speed_ratio(grid[own], grid[best], False)
        again = 1 + len(candidates(found.points))  # and plain decoding, as at first
        calibrated = 1 + sum(map(len, found.points.values())) + again
        share = len(warm_up) / len(others) * calibrated / len(searched)
        other = usual.get(name)
        usual_ratio, usual_low, usual_high = against[other or own]
        rows.append(
            {
                "drafter": name,
                "way": way,
                "g*": own,
                "ms/step": 1000 * points[own].seconds,
                "tau": points[own].tau,
                "tau, 95 %": _tau(grid[own]),
                "beats plain": "no" if found.plain else "yes",
                "tokens/s at g*": points[own].rate,
                "expected": fitted.rate,
                "best g": best,
                "tokens/s there": points[best].rate,
                "g* vs best": ratio,
                "95 %": f"{low:.3f} to {high:.3f}",
                "share of the search's measurements": share,
                "usual g": other or "-",
                "its tau": _tau(grid[other]) if other else "-",
                "g* vs usual": 1 / usual_ratio if other else "-",
                "its 95 %": f"{1 / usual_high:.3f} to {1 / usual_low:.3f}" if other else "-",
                "details": ways[way].details,
            }
        )
        around += [
            {"drafter": name, "nodes": g, "minus g*": g - own, "tau": _tau(grid[g]),
             "ms/step": 1000 * points[g].seconds, "tokens/s": points[g].rate,
             "vs g*": bounded(*against[g])}
            for g in near
        ]  # fmt: skip
        sampled += [{"drafter": name} | _sampled(grid, budgets, count) for count in sample_sizes]
        measures = [
            ("search", points[g], [b * points[own].rate for b in against[g][1:]]) for g in tried
        ]
        measures += [
            (f"calibration, {each}", point, [point.rate] * 2)
            for each, calibrating in found.points.items()
            for point in calibrating
        ]
        sizes += [
            {"drafter": name, "measured in": what, "nodes": point.budget, "tokens/s": point.rate,
             "low": bounds[0], "high": bounds[1]}
            for what, point, bounds in measures
        ]  # fmt: skip
    bounds = {"tokens/s": ("low", "high")}
    plot = Plot("nodes", ("tokens/s",), "measured in", "drafter", interval=bounds, table=SIZES)
    more = {AROUND: around if deviations else [], SAMPLES: sampled, SIZES: sizes}
    more = {title: table for title, table in more.items() if table}
    return Result("Calibrated draft sizes against a search", rows, (plot,), more)


def _tau(statistics: list[Statistics]) -> str | None:
    """Tokens of a step with half of the 95 % interval over prompts."""
    columns = [(each.tokens - each.answers, each.target_forwards) for each in statistics]
    return bounded(point_of(0, statistics).tau, *rate_interval(*zip(*columns, strict=True)))


def _sampled(
    grid: dict[int, list[Statistics]], budgets: Sequence[int], count: int
) -> dict[str, object]:
    """What calibrations with `count` of the prompts of the search choose among `budgets`, drawn
    `DRAWS` times: medians and 95 % of the draws. grid: statistics of each prompt by size; the speed
    of a choice is that of all of them, on lines between the sizes."""
    chance, prompts = np.random.default_rng(0), len(next(iter(grid.values())))
    chosen, seconds = [], []
    for _ in range(DRAWS):
        drawn = chance.choice(prompts, count, replace=False)
        own = {g: [grid[g][place] for place in drawn] for g in budgets}
        chosen.append(Curve(tuple(point_of(g, each) for g, each in own.items())).best())
        seconds.append(sum(each.seconds for part in own.values() for each in part))
    rates = [point_of(g, each).rate for g, each in sorted(grid.items())]
    best = [point.budget for point in chosen]
    reached = np.interp(best, sorted(grid), rates) / max(rates)
    columns = {
        "g*": best,
        "ms/step": [1000 * point.seconds for point in chosen],
        "tau": [point.tau for point in chosen],
        "vs best": reached,
        "measuring, s": seconds,
    }
    row: dict[str, object] = {"prompts": count}
    for column, values in columns.items():
        low, middle, high = np.quantile(values, (0.025, 0.5, 0.975))
        row |= {column: float(middle), f"{column}, 95 %": f"{low:.3g} to {high:.3g}"}
    return row
