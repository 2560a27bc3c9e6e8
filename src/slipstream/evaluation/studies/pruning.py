"""What pruning keeps: calibrated on some prompts, tried on others."""

from dataclasses import asdict

from slipstream.data.rendering import render_prompt
from slipstream.decoding.pruning_calibration import calibrate, outcome, record_trees
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.prompts import Prompt, divided
from slipstream.evaluation.studies.findings import Findings
from slipstream.targets.target import Target


class PruningStudy:
    """The first `calibration_prompts` choose threshold and cap, the others test them.

    keep: which share of accepted drafts must survive; looser and stricter ones are shown beside it.
    """

    def __init__(
        self, drafter: Streaming, budget: int, calibration_prompts: int, keep: list[float]
    ):
        self.drafter, self.budget = drafter, budget
        self.calibration_prompts, self.keep = calibration_prompts, keep

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        trees, held_out = (
            record_trees(
                target,
                self.drafter,
                [render_prompt(target.tokenizer, prompt.text) for prompt in part],
                self.budget,
            )
            for part in divided(prompts, self.calibration_prompts)
        )
        rows = []
        for keep in self.keep:
            found = calibrate(trees, keep)
            tried = outcome(held_out, found.threshold, found.cap)
            rows.append(
                {
                    "asked for": keep,
                    **asdict(found),
                    "kept_paths, held out": tried.kept_paths,
                    "kept_drafts, held out": tried.kept_drafts,
                    "pruned, held out": tried.pruned,
                }
            )
        title = f"Pruning trees of {self.budget} nodes"
        return Findings(title, rows, lambda figure: _draw(figure, rows))


def _draw(figure, rows: list[dict]) -> None:
    axes = figure.subplots()
    for suffix, name in (("", "prompts it was calibrated on"), (", held out", "held-out prompts")):
        axes.plot(
            [100 * row["pruned" + suffix] for row in rows],
            [100 * row["kept_drafts" + suffix] for row in rows],
            marker="o",
            label=name,
        )
    axes.set_xlabel("nodes pruned, %")
    axes.set_ylabel("accepted drafts that survive, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
