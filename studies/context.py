"""What a decoding step costs after ever more committed tokens (appendix O)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from unittest.mock import patch

import torch
from rich.progress import track

from slipstream.core.masks import tree_mask
from slipstream.core.settings import Count, Size
from slipstream.evaluation.row_cost import row_costs
from slipstream.targets import attention
from slipstream.targets.compiled import CompiledLayers
from studies import Plot, Prompt, Result, Target

# All lengths are timed so often in turn, so that a change of the machine's load meets all.
ROUNDS = 5


def context(
    target: Target,
    prompts: list[Prompt],
    lengths: Sequence[Count],
    row_counts: Sequence[Size],
    repeats: Count,
) -> Result:
    """Steps of each of `row_counts` rows (one: plain decoding) at each of `lengths` committed
    tokens, and the same steps with attention left out: the keys and values that attention must read
    grow with the context, nothing else should. Weights do not matter to time, so lengths may exceed
    what the target was trained for.
    """
    times: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for _ in track(range(ROUNDS), description="rounds"):
        for length in lengths:
            steps = row_costs(target, length, repeats, tuple(row_counts))
            with without_attention(target):
                others = row_costs(target, length, repeats, tuple(row_counts))
            for count in row_counts:
                times.setdefault((length, count), []).append((steps[count], others[count]))
    rows = []
    for (length, count), found in times.items():
        step, other = (1000 * median(each) for each in zip(*found, strict=True))
        cache = target.new_cache(length + count)
        mask = tree_mask(torch.ones(1, count, count, dtype=torch.bool), length, None)
        slot = cache.nbytes / cache.capacity / cache.batch_size
        rows.append(
            {"committed": length, "rows": count, "step, ms": step, "beyond attention, ms": other,
             "mask, KiB": mask.nbytes / 1024, "cache, MiB": slot * (length + count) / 2**20}
        )  # fmt: skip
    plot = Plot("committed", (("step, ms", "beyond attention, ms"),), hue="rows", log="x")
    return Result("Context (appendix O)", rows, (plot,))


@contextmanager
def without_attention(target: Target) -> Iterator[None]:
    """Within, `target` runs all but the attention itself: keys and values are staged and masks made
    as ever. Steps that were compiled are compiled again."""

    def skip(module, query, *_, **__) -> tuple[torch.Tensor, None]:
        return query.transpose(1, 2).contiguous(), None

    compiled = target.compiled and CompiledLayers(target)
    with patch.object(attention, "attend", skip), patch.object(target, "compiled", compiled):
        yield
