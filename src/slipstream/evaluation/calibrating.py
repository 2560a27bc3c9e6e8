"""What `calibrate=true` does: measure a drafter at several sizes, keep the best, show curves."""

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.calibration import (
    Calibration,
    Calibrations,
    Curve,
    calibrate,
    calibration_key,
    described,
)
from slipstream.drafters.base import Drafter
from slipstream.evaluation.prompts import Prompt
from slipstream.speculators.checkpoint import check_writable
from slipstream.targets.target import Target


class Calibrating:
    """budgets: sizes that are measured, ascending; num_prompts: warm-up prompts; repeats: how often
    each is decoded; folder: where what was found is kept."""

    def __init__(self, budgets: list[int], num_prompts: int, repeats: int, folder: str):
        self.budgets, self.num_prompts, self.repeats = budgets, num_prompts, repeats
        self.calibrations = Calibrations(folder)

    def run(
        self,
        target: Target,
        drafter: Drafter,
        prompts: list[Prompt],
        sampling: Sampling,
        limits: Limits,
        output: Path,
    ) -> list[dict]:
        """Calibrate `drafter`, print the table, draw plot.png and keep the choice."""
        check_writable(output, "output_dir")
        check_writable(self.calibrations.folder, "calibration.folder")
        key = calibration_key(target, described(drafter), sampling)
        variants = drafter.attach(target).variants()
        ids = [render_prompt(target.tokenizer, prompt.text) for prompt in prompts]
        found = calibrate(target, variants, ids, sampling, limits, self.budgets, self.repeats)
        rows = rows_of(found)
        self._print(found, rows)
        plot(output / "plot.png", found)
        path = self.calibrations.save(key, found)
        print(f"kept in {path}, for budget=auto; curves: {output}/plot.png")
        return rows

    def _print(self, found: Calibration, rows: list[dict]) -> None:
        console, table = Console(width=None if Console().is_terminal else 150), Table()
        for place, column in enumerate(rows[0]):
            table.add_column(column, justify="left" if place == 0 else "right")
        for row in rows:
            table.add_row(
                *(each if isinstance(each, str) else f"{each:.4g}" for each in row.values())
            )
        console.print(table)
        if found.plain:
            console.print(
                "no size beats plain decoding: budget=auto decodes plainly", highlight=False
            )
        else:
            console.print(
                f"best: {found.way} with {found.budget} nodes, {found.speedup:.2f}x plain decoding "
                "as fitted",
                highlight=False,
            )


def rows_of(found: Calibration) -> list[dict]:
    """A row for plain decoding, and one for each way and size."""
    plain = 1 / found.plain_seconds
    rows = [_row("plain", 1, found.plain_seconds, 1.0, plain)]
    for way, points in found.points.items():
        rows += [_row(way, each.budget, each.seconds, each.tau, plain) for each in points]
    return rows


def _row(way: str, budget: int, seconds: float, tau: float, plain: float) -> dict:
    rate = tau / seconds
    return {
        "way": way,
        "nodes": budget,
        "ms/step": 1000 * seconds,
        "tau": tau,
        "tokens/s": rate,
        "vs plain": rate / plain,
    }


def plot(path: Path, found: Calibration) -> None:
    """Points and fitted curves of seconds, tokens and rate by size, with the size chosen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 3.8))
    labels = "ms a step, s(g)", "tokens a step, tau(g)", "tokens a second"
    for way, points in found.points.items():
        curve, budgets = Curve(tuple(points)), np.array([point.budget for point in points])
        fine = np.linspace(budgets[0], budgets[-1], 200)
        measured = (
            [1000 * point.seconds for point in points],
            [point.tau for point in points],
            [point.rate for point in points],
        )
        fitted = 1000 * curve.seconds(fine), curve.tau(fine), curve.rate(fine)
        for axes, own, line in zip(panels, measured, fitted, strict=True):
            (dots,) = axes.plot(budgets, own, "o", label=way)
            axes.plot(fine, line, "-", color=dots.get_color())
    for axes, label in zip(panels, labels, strict=True):
        if not found.plain:
            axes.axvline(found.budget, color="grey", linestyle=":", label=f"g* = {found.budget}")
        axes.set_xlabel("nodes of a draft tree")
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    panels[2].axhline(1 / found.plain_seconds, color="black", linewidth=0.8, label="plain decoding")
    panels[2].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
