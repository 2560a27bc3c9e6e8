"""Calibrated draft sizes against a search of sizes (UNISPEC, Figure 5, Tables 13 and 15 to 17)."""

import numpy as np

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.calibration import (
    Calibration,
    Curve,
    calibrate,
    fastest,
    measured,
    point_of,
)
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.engine import Engine
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.base import Drafter
from slipstream.evaluation.prompts import Prompt, divided
from slipstream.evaluation.studies.findings import Findings
from slipstream.targets.target import Target

RESAMPLES = 2000


class DraftSizeStudy:
    """Each of `drafters` is calibrated with the sizes `budgets` on `calibration_prompts` prompts;
    then sizes from the smallest to the largest, in steps of `step`, decode the others.
    deviations: nodes that the draft is made larger and smaller than g*; usual: by drafter, the size
    that its paper has, if that is to be tried, too; repeats: how often each prompt is decoded."""

    def __init__(
        self,
        drafters: dict[str, Drafter],
        budgets: list[int],
        step: int,
        deviations: list[int],
        usual: dict[str, int],
        calibration_prompts: int,
        repeats: int,
    ):
        if unknown := set(usual) - set(drafters):
            raise InputError(
                f"study.usual: there is no drafter {', '.join(sorted(unknown))}; name some of "
                + ", ".join(drafters)
            )
        self.drafters, self.budgets = drafters, budgets
        self.searched = sorted({*range(budgets[0], budgets[-1], step), budgets[-1]})
        self.deviations, self.usual = deviations, usual
        self.calibration_prompts, self.repeats = calibration_prompts, repeats

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        warm_up, others = (
            [render_prompt(target.tokenizer, prompt.text) for prompt in part]
            for part in divided(prompts, self.calibration_prompts)
        )
        rows, around, calibrations, grids = [], [], {}, {}
        for name, drafter in self.drafters.items():
            drafter.bind(target)
            found = calibrate(
                target, drafter.ways(), warm_up, Sampling(), Limits(96), self.budgets, self.repeats
            )
            usual = self.usual.get(name)
            grid = self._grid(target, drafter, found, usual, others)
            rows.append(self._row(name, found, grid, usual, len(warm_up) / len(others)))
            around += [{"drafter": name} | row for row in self._around(found, grid)]
            calibrations[name], grids[name] = found, grid
        return Findings(
            "Calibrated draft sizes against a search",
            rows,
            lambda figure: _draw(figure, calibrations, grids),
            {"Sizes around g* (Table 13)": around} if self.deviations else {},
        )

    def _grid(
        self,
        target: Target,
        drafter: Drafter,
        found: Calibration,
        usual: int | None,
        prompts: list[list[int]],
    ) -> dict[int, list[Statistics]]:
        """Each size's statistics, by prompt, the way to draft being the one chosen."""
        way, _ = fastest(found.points)
        chosen = drafter.ways()[way]
        sizes = {*self.searched, *self._sizes_around(found), *([] if usual is None else [usual])}
        decoders: dict[tuple[str, int], Decoder] = {
            ("", size): Engine(target, chosen, Sampling(), Limits(96), size)
            for size in sorted(sizes)
        }
        return {size: own for (_, size), own in measured(decoders, prompts, self.repeats).items()}

    def _sizes_around(self, found: Calibration) -> list[int]:
        _, own = fastest(found.points)
        deviations = [-each for each in self.deviations[::-1]] + [0, *self.deviations]
        return [own + each for each in deviations if own + each >= 2]

    def _row(
        self,
        name: str,
        found: Calibration,
        grid: dict[int, list[Statistics]],
        usual: int | None,
        share: float,
    ) -> dict[str, object]:
        rates = {size: point_of(size, own).rate for size, own in grid.items()}
        way, own = fastest(found.points)
        best = max({*self.searched, own}, key=rates.__getitem__)
        low, high = _interval(grid[own], grid[best])
        seconds, tau = Curve(tuple(found.points[way])).at(own)
        calibrated = 1 + sum(map(len, found.points.values()))  # plain decoding, and every way
        return {
            "drafter": name,
            "way": way,
            "g*": own,
            "beats plain": "no" if found.plain else "yes",
            "tokens/s at g*": rates[own],
            "expected": tau / seconds,
            "best g": best,
            "tokens/s there": rates[best],
            "g* vs best": rates[own] / rates[best],
            "95 %": f"{low:.3f} to {high:.3f}",
            "share of the search's measurements": share * calibrated / len(self.searched),
            "usual g": usual or "-",
            "g* vs usual": rates[own] / rates[usual] if usual else "-",
        }

    def _around(
        self, found: Calibration, grid: dict[int, list[Statistics]]
    ) -> list[dict[str, object]]:
        points = {size: point_of(size, grid[size]) for size in self._sizes_around(found)}
        _, own = fastest(found.points)
        return [
            {
                "nodes": size,
                "minus g*": size - own,
                "tau": point.tau,
                "ms/step": 1000 * point.seconds,
                "tokens/s": point.rate,
                "vs g*": point.rate / points[own].rate,
            }
            for size, point in points.items()
        ]


def _interval(one: list[Statistics], other: list[Statistics]) -> tuple[float, float]:
    """95 % of the ratio of two rates, prompts resampled in pairs."""
    chance = np.random.default_rng(0)
    chosen = chance.integers(len(one), size=(RESAMPLES, len(one)))

    def rates(statistics: list[Statistics]) -> np.ndarray:
        tokens = np.array([each.tokens - each.answers for each in statistics], dtype=float)
        seconds = np.array([each.seconds - each.shares.get("prefill", 0.0) for each in statistics])
        return tokens[chosen].sum(1) / seconds[chosen].sum(1)

    low, high = np.quantile(rates(one) / rates(other), [0.025, 0.975])
    return float(low), float(high)


def _draw(figure, calibrations: dict[str, Calibration], grids: dict) -> None:
    """Bars are 95 % of how much faster or slower than g* a size of the search is."""
    panels = figure.subplots(1, len(calibrations), squeeze=False)[0]
    for axes, (name, found) in zip(panels, calibrations.items(), strict=True):
        grid, (_, own) = grids[name], fastest(found.points)
        sizes = sorted(grid)
        rates = np.array([point_of(size, grid[size]).rate for size in sizes])
        bounds = np.array([_interval(grid[size], grid[own]) for size in sizes]).T
        bars = abs(bounds * point_of(own, grid[own]).rate - rates)
        axes.errorbar(sizes, rates, bars, fmt=".", color="grey", elinewidth=0.8, label="search")
        for way, points in found.points.items():
            fine = np.linspace(points[0].budget, points[-1].budget, 200)
            (line,) = axes.plot(fine, Curve(tuple(points)).rate(fine), label=f"fitted, {way}")
            measured_at = [point.budget for point in points], [point.rate for point in points]
            axes.plot(*measured_at, "o", markersize=3, color=line.get_color())
        axes.axvline(own, color="black", linestyle=":", label=f"g* = {own}")
        axes.set_title(name)
        axes.set_xlabel("nodes of a draft tree")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7)
    panels[0].set_ylabel("tokens a second, after the prefill")
