"""Extra parameters and FLOPs of every method on the paper's models (Figures 8 and 9)."""

from slipstream.evaluation.costs import SHAPES, costs
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.targets.target import Target


class OverheadStudy:
    """gamma: length of a draft; nodes: of the tree whose nodes carry fused streams."""

    def __init__(self, gamma: int, num_msa_layers: int, attended: int, nodes: int):
        self.options = (gamma, num_msa_layers, attended, nodes)

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        rows = [
            {
                "target": name,
                "method": cost.method,
                "extra parameters": cost.parameters,
                "GFLOPs per draft": cost.flops / 1e9,
            }
            for name in SHAPES
            for cost in costs(name, *self.options)
        ]
        return Findings("Overheads", rows, lambda figure: _draw(figure, rows))


def _draw(figure, rows: list[dict]) -> None:
    axes = figure.subplots(1, 2)
    names = list(dict.fromkeys(row["target"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for place, method in enumerate(methods):
        chosen = [row for row in rows if row["method"] == method]
        where = [names.index(row["target"]) + place * 0.13 for row in chosen]
        for side, key in enumerate(("extra parameters", "GFLOPs per draft")):
            axes[side].barh(where, [row[key] for row in chosen], height=0.12, label=method)
            axes[side].set_title(key)
    for side in axes:
        side.set_xscale("log")
        side.set_yticks([place + 0.33 for place in range(len(names))], names, fontsize=8)
        side.invert_yaxis()
        side.spines[["top", "right"]].set_visible(False)
    axes[1].set_yticks([])
    figure.legend(
        *axes[0].get_legend_handles_labels(), fontsize=8, ncols=3, loc="outside lower center"
    )
