"""Extra parameters and FLOPs of every method on the paper's models (Figures 8 and 9)."""

from slipstream.evaluation.costs import SHAPES, costs
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.targets.target import Target

PARAMETERS, DRAFT, PRUNING = "extra parameters", "GFLOPs per draft", "GFLOPs of the pruning head"


class OverheadStudy:
    """gamma: length of a draft; attended: tokens a row attends to; drafted: nodes of the tree that
    the pruning head reads; nodes: those that it leaves, whose fused streams run."""

    def __init__(
        self, gamma: int, num_msa_layers: int, attended: int, nodes: int, drafted: int = 121
    ):
        self.options = (gamma, num_msa_layers, attended, nodes, drafted)

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        rows = [
            {
                "target": name,
                "method": cost.method,
                PARAMETERS: cost.parameters,
                DRAFT: _giga(cost.flops),
                PRUNING: _giga(cost.pruning_flops),
            }
            for name in SHAPES
            for cost in costs(name, *self.options)
        ]
        return Findings("Overheads", rows, lambda figure: _draw(figure, rows))


def _giga(flops: int | None) -> float | None:
    return None if flops is None else flops / 1e9


def _draw(figure, rows: list[dict]) -> None:
    """Bars by target and method; the pruning head's FLOPs are a pale end of the bar."""
    axes = figure.subplots(1, 2)
    names = list(dict.fromkeys(row["target"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for place, method in enumerate(methods):
        chosen = [row for row in rows if row["method"] == method and row[PARAMETERS] is not None]
        where = [names.index(row["target"]) + place * 0.13 for row in chosen]
        look = {"height": 0.12, "color": f"C{place}"}
        with_pruning = [row[DRAFT] + (row[PRUNING] or 0) for row in chosen]
        axes[0].barh(where, [row[PARAMETERS] for row in chosen], label=method, **look)
        axes[1].barh(where, [row[DRAFT] for row in chosen], **look)
        axes[1].barh(where, with_pruning, alpha=0.4, **look)
    axes[0].set_title(PARAMETERS)
    axes[1].set_title(f"{DRAFT} (pale: pruning head)")
    for side in axes:
        side.set_xscale("log")
        side.set_yticks([place + 0.33 for place in range(len(names))], names, fontsize=8)
        side.invert_yaxis()
        side.spines[["top", "right"]].set_visible(False)
    axes[1].set_yticks([])
    figure.legend(
        *axes[0].get_legend_handles_labels(), fontsize=8, ncols=3, loc="outside lower center"
    )
