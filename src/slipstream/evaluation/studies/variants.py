"""Speculators that differ in one setting, trained by one recipe and decoded side by side."""

from pathlib import Path

from rich.progress import track

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.comparison import compare, overall
from slipstream.evaluation.methods import Method, Plain, Speculative
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.evaluation.studies.steps import run_step
from slipstream.speculators.checkpoint import load_speculator
from slipstream.targets.target import Target


class VariantStudy:
    """All in lossless mode, where the answers are the target's own: what differs is tau and speed,
    in place of the paper's metrics.

    variants: name -> overrides of train.py; recipe: overrides of all of them; folder: where the
    speculators are kept (one that is there is not trained again).
    """

    def __init__(
        self,
        title: str,
        variants: dict[str, list[str]],
        recipe: list[str],
        folder: str,
        schedule: str,
        top_k: int,
        budget: int,
        repeats: int,
    ):
        self.title, self.variants, self.recipe = title, variants, list(recipe)
        self.folder, self.schedule = Path(folder), schedule
        self.top_k, self.budget, self.repeats = top_k, budget, repeats

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        speculators = {}
        for name, overrides in track(list(self.variants.items()), description="training"):
            place = self.folder / "".join(c if c.isalnum() else "_" for c in name)
            model = run_step("train.py", [*self.recipe, *overrides], place, "model")
            speculators[name] = load_speculator(model, target)
        methods: dict[str, Method] = {"plain": Plain()}
        for name, speculator in speculators.items():
            drafter = Streaming(speculator, self.schedule, self.top_k)
            methods[name] = Speculative(drafter, self.budget)
        runs = compare(methods, prompts, target, Sampling(), Limits(96), self.repeats, seed=0)
        records = overall(runs, prompts, str(target.dtype))
        rows = [
            {
                "variant": name,
                "extra parameters": speculator.num_extra_parameters(),
                "adapters": speculator.num_adapter_parameters(),
                "tau": records[name].tau,
                "speed vs plain": records[name].speedup_vs_plain,
                "draft, s": records[name].seconds_draft,
                "verify, s": records[name].seconds_verify,
                "identical": f"{records[name].identical}/{len(prompts)}",
            }
            for name, speculator in speculators.items()
        ]
        return Findings(self.title, rows, lambda figure: _draw(figure, rows))


def _draw(figure, rows: list[dict[str, object]]) -> None:
    axes = figure.subplots(1, 2)
    for place, column in enumerate(("tau", "speed vs plain")):
        bars = axes[place].bar(
            [row["variant"] for row in rows], [row[column] for row in rows], color=f"C{place}"
        )
        axes[place].bar_label(bars, fmt="%.2f", fontsize=8)
        axes[place].set_title(column)
        axes[place].spines[["top", "right"]].set_visible(False)
    axes[1].axhline(1.0, color="grey", linewidth=0.8)
