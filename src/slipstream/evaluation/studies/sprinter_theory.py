"""Length and time of SPRINTER's runs by the verifier's rates (SPRINTER, Figures 5 and 6)."""

import torch

from slipstream.core.errors import InputError
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.evaluation.theory import (
    Rates,
    expected_run_length,
    expected_stop_time,
    simulate_run_lengths,
)
from slipstream.targets.target import Target

TRUE_POSITIVES = [*(tenths / 10 for tenths in range(10)), 0.95, 0.99]
LENGTH, TIME = "E[N]", "E[T_stop], s"
SIMULATED = ", simulated"


class SprinterTheory:
    """Runs whose first `acceptable` tokens are acceptable, by theorems 2 and 3 and by simulation of
    `samples` runs for each pair of rates. draft_seconds: for one token. It needs no model.

    Raises `InputError` for numbers that cannot be used.
    """

    def __init__(
        self, acceptable: int, false_positives: list[float], draft_seconds: float, samples: int
    ):
        if acceptable < 1:
            raise InputError(f"study.acceptable: {acceptable} is too few tokens; give 1 or more")
        if samples < 1:
            raise InputError(f"study.samples: {samples} is too few runs; give 1 or more")
        if not draft_seconds > 0:
            raise InputError(f"study.draft_seconds: {draft_seconds} must be larger than 0")
        if not false_positives:
            raise InputError("study.false_positives: name at least one rate")
        self.acceptable, self.draft_seconds = acceptable, draft_seconds
        self.samples = samples
        self.grid = [Rates(true, false) for false in false_positives for true in TRUE_POSITIVES]

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        generator = torch.Generator().manual_seed(0)
        rows = [self._row(rates, generator) for rates in self.grid]
        title = "SPRINTER's runs, by theorem and by simulation (SPRINTER, Figures 5 and 6)"
        scenario = self.acceptable, self.draft_seconds
        return Findings(title, rows, lambda figure: _draw(figure, rows, *scenario))

    def _row(self, rates: Rates, generator: torch.Generator) -> dict[str, object]:
        kept, drafted = simulate_run_lengths(rates, self.acceptable, self.samples, generator)
        return {
            "eta_TP": rates.true_positive,
            "eta_FP": rates.false_positive,
            LENGTH: expected_run_length(rates, self.acceptable),
            LENGTH + SIMULATED: kept.double().mean().item(),
            TIME: expected_stop_time(rates, self.acceptable, self.draft_seconds),
            TIME + SIMULATED: drafted.double().mean().item() * self.draft_seconds,
        }


def _draw(figure, rows: list[dict], acceptable: int, draft_seconds: float) -> None:
    """Curves are the theorems, dots the simulation, dashed lines a verifier without errors."""
    sides = figure.subplots(1, 2)
    dense = torch.linspace(0, 0.999, 200, dtype=torch.float64).tolist()
    rates_drawn = list(dict.fromkeys(row["eta_FP"] for row in rows))
    for place, false in enumerate(rates_drawn):
        grid = [Rates(true, false) for true in dense]
        curves = {
            LENGTH: [expected_run_length(rates, acceptable) for rates in grid],
            TIME: [expected_stop_time(rates, acceptable, draft_seconds) for rates in grid],
        }
        chosen = [row for row in rows if row["eta_FP"] == false]
        for side, (column, curve) in zip(sides, curves.items(), strict=True):
            side.plot(dense, curve, color=f"C{place}", label=rf"$\eta_{{FP}}$ = {false:g}, theorem")
            side.plot(
                [row["eta_TP"] for row in chosen],
                [row[column + SIMULATED] for row in chosen],
                "o",
                color=f"C{place}",
                markeredgecolor="white",
                markersize=6,
                clip_on=False,
                label=rf"$\eta_{{FP}}$ = {false:g}, simulation",
            )
    beyond = max(rates_drawn) / (1 - max(rates_drawn))
    _frame(sides[0], acceptable, beyond, "tokens kept in a run, E[N]")
    sides[0].set_title(f"Figure 5: length of a run, r = {acceptable}", fontsize=11)
    seconds = (acceptable + 1) * draft_seconds
    _frame(sides[1], seconds, beyond * draft_seconds, r"seconds until the stop, E[$T_{stop}$]")
    sides[1].set_title(rf"Figure 6: time of a run, $t_d$ = {draft_seconds:g} s", fontsize=11)
    sides[0].legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(0.0, 0.78))


def _frame(side, perfect: float, gap: float, label: str) -> None:
    """Axes, the line of a verifier without errors, and how far the largest eta_FP ends above it."""
    side.axhline(perfect, color="grey", linestyle="--", linewidth=1)
    note = {"fontsize": 9, "color": "dimgrey"}
    side.text(0.02, perfect, f"verifier without errors: {perfect:g}", va="bottom", **note)
    if gap:
        ends = {"xy": (1.04, perfect), "xytext": (1.04, perfect + gap)}
        arrow = {"arrowstyle": "<->", "color": "dimgrey", "shrinkA": 0, "shrinkB": 0}
        side.annotate("", **ends, arrowprops=arrow)
        side.text(1.06, perfect + gap / 2, f"gap {gap:.3g}", va="center", **note)
    side.set_xlabel(r"true-positive rate of the verifier, $\eta_{TP}$")
    side.set_ylabel(label)
    side.set_xlim(0, 1.24)
    side.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    side.set_ylim(bottom=0)
    side.spines[["top", "right"]].set_visible(False)
