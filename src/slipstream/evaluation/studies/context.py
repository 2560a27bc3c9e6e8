"""What a decoding step costs after ever more committed tokens (appendix O)."""

import statistics
import time

import torch
from rich.progress import track

from slipstream.core.masks import tree_mask
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.row_cost import row_costs
from slipstream.evaluation.studies.findings import Findings
from slipstream.targets.attention import attend
from slipstream.targets.target import Target

ROUNDS = 5
"""All lengths are timed so often in turn, so that a change of the machine's load meets all."""


class ContextStudy:
    """Steps of each of `row_counts` rows (one: plain decoding) at each of `lengths` committed
    tokens. Attention alone is timed beside them: the keys and values it must read grow with the
    context, nothing else should. Weights do not matter to time, so lengths may exceed what the
    target was trained for.
    """

    def __init__(self, lengths: list[int], row_counts: list[int], repeats: int):
        self.lengths, self.row_counts, self.repeats = lengths, row_counts, repeats

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        times: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for _ in track(range(ROUNDS), description="rounds"):
            for length in self.lengths:
                steps = row_costs(target, length, self.repeats, tuple(self.row_counts))
                for count, seconds in steps.items():
                    attention = attention_seconds(target, length, count, self.repeats)
                    times.setdefault((length, count), []).append((seconds, attention))
        rows = []
        for (length, count), found in times.items():
            step, attention = (statistics.median(each) for each in zip(*found, strict=True))
            cache = target.new_cache(length + count)
            mask = tree_mask([length], torch.ones(1, count, count, dtype=torch.bool))
            rows.append(
                {
                    "committed": length,
                    "rows": count,
                    "step, ms": 1000 * step,
                    "attention, ms": 1000 * attention,
                    "beyond attention, ms": 1000 * (step - attention),
                    "mask, KiB": mask.nbytes / 1024,
                    "cache, MiB": cache.nbytes * (length + count) / cache.capacity / 2**20,
                }
            )
        return Findings("Context (appendix O)", rows, lambda figure: _draw(figure, rows))


@torch.inference_mode()
def attention_seconds(target: Target, committed: int, count: int, repeats: int) -> float:
    """Median seconds of the attention of all layers, `count` rows over `committed` tokens."""
    cache, module = target.new_cache(committed + count), torch.nn.Module()
    for keys, values in cache.layers:
        keys.normal_(), values.normal_()
    heads, size = target.model.config.num_attention_heads, cache.layers[0][0].shape[-1]
    query = torch.randn(1, heads, count, size, dtype=target.dtype, device=target.device)
    mask = tree_mask([committed], torch.ones(1, count, count, dtype=torch.bool))
    mask, seconds = mask.to(target.device), []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        for keys, values in cache.layers:
            seen = (tensor[..., : committed + count, :] for tensor in (keys, values))
            attend(module, query, *seen, mask, scaling=size**-0.5)
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


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
