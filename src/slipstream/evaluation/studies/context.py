"""What a decoding step costs after ever more committed tokens (appendix O)."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from rich.progress import track

from slipstream.core.masks import tree_mask
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.row_cost import row_costs
from slipstream.evaluation.studies.findings import Findings
from slipstream.targets import attention
from slipstream.targets.compiled import CompiledLayers
from slipstream.targets.target import Target

ROUNDS = 5
"""All lengths are timed so often in turn, so that a change of the machine's load meets all."""


class ContextStudy:
    """Steps of each of `row_counts` rows (one: plain decoding) at each of `lengths` committed
    tokens, and the same steps with attention left out: the keys and values that attention must read
    grow with the context, nothing else should. Weights do not matter to time, so lengths may exceed
    what the target was trained for.
    """

    def __init__(self, lengths: list[int], row_counts: list[int], repeats: int):
        self.lengths, self.row_counts, self.repeats = lengths, tuple(row_counts), repeats

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        times: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for _ in track(range(ROUNDS), description="rounds"):
            for length in self.lengths:
                steps = row_costs(target, length, self.repeats, self.row_counts)
                with without_attention(target):
                    others = row_costs(target, length, self.repeats, self.row_counts)
                for count in self.row_counts:
                    times.setdefault((length, count), []).append((steps[count], others[count]))
        rows = []
        for (length, count), found in times.items():
            step, other = (statistics.median(each) for each in zip(*found, strict=True))
            cache = target.new_cache(length + count)
            mask = tree_mask([length], torch.ones(1, count, count, dtype=torch.bool))
            rows.append(
                {
                    "committed": length,
                    "rows": count,
                    "step, ms": 1000 * step,
                    "beyond attention, ms": 1000 * other,
                    "mask, KiB": mask.nbytes / 1024,
                    "cache, MiB": cache.nbytes * (length + count) / cache.capacity / 2**20,
                }
            )
        return Findings("Context (appendix O)", rows, lambda figure: _draw(figure, rows))


@contextmanager
def without_attention(target: Target) -> Iterator[None]:
    """Within, `target` runs all but the attention itself: keys and values are staged and masks made
    as ever. Steps that were compiled are compiled again."""
    usual = target.compiled
    with patch.object(attention, "attend", _skip):
        target.compiled = None if usual is None else CompiledLayers(target)
        try:
            yield
        finally:
            target.compiled = usual


def _skip(module, query, *_, **__) -> tuple[torch.Tensor, None]:
    return query.transpose(1, 2).contiguous(), None


def _draw(figure, rows: list[dict]) -> None:
    axes = figure.subplots()
    for place, count in enumerate(dict.fromkeys(row["rows"] for row in rows)):
        chosen = [row for row in rows if row["rows"] == count]
        lengths = [row["committed"] for row in chosen]
        for column, style in (("step, ms", "-o"), ("beyond attention, ms", "--x")):
            label = f"{column.split(',')[0]}, {count} rows"
            axes.plot(
                lengths, [row[column] for row in chosen], style, color=f"C{place}", label=label
            )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("committed tokens")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
