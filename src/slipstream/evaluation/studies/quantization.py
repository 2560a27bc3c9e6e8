"""Streams on 8-bit and 4-bit targets: speed and task metric (Table 4)."""

from pathlib import Path

from rich.progress import track

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.comparison import compare, summarise
from slipstream.evaluation.methods import Method, Plain, Speculative
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.evaluation.studies.steps import run_step
from slipstream.targets.loading import load_target
from slipstream.targets.quantized import weight_bytes
from slipstream.targets.target import Target

UNQUANTISED = "none"


class QuantizationStudy:
    """One speculator for each of `quantizations` (None: the weights as they are), trained by one
    recipe on the target as it is decoded; all are compared with plain decoding of the same weights.

    recipe: overrides of train.py; folder: where the speculators are kept (one that is there is not
    trained again).
    """

    def __init__(
        self,
        quantizations: list[str | None],
        recipe: list[str],
        folder: str,
        top_k: int,
        budget: int,
        repeats: int,
    ):
        self.quantizations, self.recipe, self.folder = quantizations, list(recipe), Path(folder)
        self.top_k, self.budget, self.repeats = top_k, budget, repeats

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        methods: dict[str, Method] = {}
        sizes = {}
        for kind in track(self.quantizations, description="training"):
            name = kind or UNQUANTISED
            override = f"target.quantization={kind or 'null'}"
            model = run_step("train.py", [*self.recipe, override], self.folder / name, "model")
            own = load_target(target.name, device=str(target.device), quantization=kind)
            sizes[name] = weight_bytes(own.model)
            methods[f"plain {name}"] = Plain(own)
            drafter = Streaming(model, "auto", self.top_k)
            methods[f"streams {name}"] = Speculative(drafter, self.budget, own)
        runs = compare(methods, prompts, target, Sampling(), Limits(96), self.repeats, seed=0)
        found = {
            (record.method, record.prompt_set): record
            for record in summarise(runs, prompts, str(target.dtype))
        }
        rows = [
            {
                "weights": name,
                "MiB": size / 2**20,
                "prompts": prompt_set,
                "plain, tokens/s": found[f"plain {name}", prompt_set].tokens_per_second,
                "speed vs plain": found[f"streams {name}", prompt_set].tokens_per_second
                / found[f"plain {name}", prompt_set].tokens_per_second,
                "tau": found[f"streams {name}", prompt_set].tau,
                "ROUGE-Lsum": found[f"streams {name}", prompt_set].rouge_lsum,
                "exact match": found[f"streams {name}", prompt_set].exact_match,
                "identical": f"{found[f'streams {name}', prompt_set].identical}"
                f"/{found[f'streams {name}', prompt_set].num_prompts}",
            }
            for name, size in sizes.items()
            for prompt_set in dict.fromkeys(prompt_set for _, prompt_set in found)
        ]
        return Findings("Quantised targets (Table 4)", rows, lambda figure: _draw(figure, rows))


def _draw(figure, rows: list[dict]) -> None:
    axes = figure.subplots()
    sets = list(dict.fromkeys(row["prompts"] for row in rows))
    for place, kind in enumerate(dict.fromkeys(row["weights"] for row in rows)):
        chosen = [row for row in rows if row["weights"] == kind]
        bars = axes.bar(
            [sets.index(row["prompts"]) + 0.27 * place for row in chosen],
            [row["speed vs plain"] for row in chosen],
            width=0.25,
            label=kind,
        )
        axes.bar_label(bars, [f"tau {row['tau']:.2f}" for row in chosen], fontsize=7)
    axes.set_xticks([number + 0.27 for number in range(len(sets))], sets)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_ylabel("speed against plain decoding of the same weights")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
