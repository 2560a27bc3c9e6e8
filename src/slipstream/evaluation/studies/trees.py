"""Chains, trees and pruned trees: speed and tau by the number of streams and children (Figures 10
and 13)."""

from dataclasses import dataclass
from itertools import product

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.pruning_calibration import calibrate, record_trees
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.comparison import compare, overall
from slipstream.evaluation.methods import Method, Plain, Speculative
from slipstream.evaluation.prompts import Prompt, divided
from slipstream.evaluation.studies.findings import Findings
from slipstream.speculators.checkpoint import load_speculator
from slipstream.targets.target import Target


@dataclass(frozen=True)
class _Point:
    gamma: int
    top_k: int
    pruned: bool


class TreeStudy:
    """Trees of `gammas` levels with `top_ks` children each: full ones of up to `largest` nodes,
    beyond that their most probable `largest` nodes. With pruning, threshold and cap are calibrated
    so that `keep` of the accepted drafts survive.

    The first `calibration_prompts` serve that alone; the others are decoded by all, interleaved.
    """

    def __init__(
        self,
        speculator: str,
        schedule: str,
        gammas: list[int],
        top_ks: list[int],
        largest: int,
        keep: float,
        calibration_prompts: int,
        repeats: int,
    ):
        self.speculator, self.schedule = speculator, schedule
        self.gammas, self.top_ks, self.largest = gammas, top_ks, largest
        self.keep, self.calibration_prompts, self.repeats = keep, calibration_prompts, repeats

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        speculator = load_speculator(self.speculator, target)
        if speculator.config.mode == "shared":
            raise InputError("study.speculator: in shared mode no stream can be left out")
        first, rest = divided(prompts, self.calibration_prompts)
        chosen = [render_prompt(target.tokenizer, prompt.text) for prompt in first]
        methods: dict[str, Method] = {"plain": Plain()}
        points: dict[str, tuple[_Point, int]] = {}
        for gamma, top_k in product(self.gammas, self.top_ks):
            part = speculator.first_streams(target, gamma)
            nodes = min(self.largest, sum(top_k**level for level in range(gamma + 1)))
            drafter = Streaming(part, self.schedule, top_k)
            found = calibrate(record_trees(target, drafter, chosen, nodes), self.keep)
            pruning = Streaming(part, self.schedule, top_k, found.threshold, found.cap)
            for pruned, way in ((False, drafter), (True, pruning)):
                point = _Point(gamma, top_k, pruned)
                points[str(point)] = point, nodes
                methods[str(point)] = Speculative(way, nodes)
        runs = compare(methods, rest, target, Sampling(), Limits(96), self.repeats, seed=0)
        records = overall(runs, rest, str(target.dtype))
        rows = [
            {
                "gamma": point.gamma,
                "k": point.top_k,
                "pruning": "yes" if point.pruned else "no",
                "nodes": nodes,
                "tau": records[name].tau,
                "speed vs plain": records[name].speedup_vs_plain,
                "verify, s": records[name].seconds_verify,
                "draft, s": records[name].seconds_draft,
                "identical": f"{records[name].identical}/{len(rest)}",
            }
            for name, (point, nodes) in points.items()
        ]
        title = f"Chains, trees and pruned trees, {self.schedule} (Figures 10 and 13)"
        return Findings(title, rows, lambda figure: _draw(figure, rows))


def _draw(figure, rows: list[dict[str, object]]) -> None:
    axes = figure.subplots(1, 2)
    gammas = list(dict.fromkeys(row["gamma"] for row in rows))
    for place, column in enumerate(("speed vs plain", "tau")):
        for color, gamma in enumerate(gammas):
            for pruning, style in (("no", "-o"), ("yes", "--x")):
                chosen = [r for r in rows if r["gamma"] == gamma and r["pruning"] == pruning]
                axes[place].plot(
                    [row["k"] for row in chosen],
                    [row[column] for row in chosen],
                    style,
                    color=f"C{color}",
                    label=f"gamma {gamma}{', pruned' if pruning == 'yes' else ''}",
                )
        axes[place].set_xlabel("k (1: a chain)")
        axes[place].set_title(column)
        axes[place].spines[["top", "right"]].set_visible(False)
    axes[0].axhline(1.0, color="grey", linewidth=0.8)
    axes[1].legend(fontsize=8)
