"""What a device makes of a large target (decoding, rows, memory bandwidth, training), and what a
decoding step costs after ever more committed tokens (appendix O)."""

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from unittest.mock import patch

import torch
from rich.progress import track

from slipstream.core.masks import tree_mask
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.methods import Method, Plain, Speculative
from slipstream.evaluation.row_cost import row_costs
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.targets import attention
from slipstream.targets.compiled import CompiledLayers, compile_like
from slipstream.targets.loading import DTYPES
from studies import Plot, Prompt, Result, Target
from studies.decoding import columns, compared
from studies.enlargement import LargeShape, enlarged_speculator, enlarged_target
from studies.training_costs import segments as training_steps
from studies.training_costs import timed

# All lengths are timed so often in turn, so that a change of the machine's load meets all.
ROUNDS = 5


def device(
    target: Target,
    prompts: list[Prompt],
    speculator: str,
    training: StreamingConfig,
    shape: LargeShape,
    dtype: str,
    budgets: list[int],
    top_k: int,
    row_counts: list[int],
    lengths: list[int],
    segments: list[int],
    repeats: int,
) -> Result:
    """The small target and its speculator, enlarged to `shape`: plain decoding, streams of both
    schedules with trees of each of `budgets` nodes, what a step of `row_counts` rows costs, and
    training steps over `lengths` tokens, dense and in `segments`.

    Bandwidth is that of copying within the device's memory, in this run; a step, drafting included,
    must read all weights but the embeddings once. Prefills are left out of both.
    """
    large = enlarged_target(target, shape, DTYPES[dtype])
    compile_like(large, target)
    streams = enlarged_speculator(load_speculator(speculator, target), target, large)
    methods: dict[str, Method] = {"plain": Plain()} | {
        f"{schedule}, {nodes} nodes": Speculative(Streaming(streams, schedule, top_k), nodes)
        for schedule in ("fused", "deferred")
        for nodes in budgets
    }
    _, records = compared(large, methods, prompts, repeats)
    read = sum(p.nbytes for p in large.family.layers.parameters()) + large.head.weight.nbytes
    bandwidth, rows = measured_bandwidth(large.device), []
    for name, record in records.items():
        seconds = (record.seconds - record.seconds_prefill) / record.target_forwards
        step = {"of bandwidth": read / seconds / bandwidth, "ms/step": 1000 * seconds}
        rows.append({"method": name} | columns(vars(record), "tokens/s", "vs plain", "tau") | step)
    costs = row_costs(large, counts=tuple(row_counts))
    steps = [
        {"rows": count, "ms": 1000 * each, "vs one row": each / costs[row_counts[0]]}
        for count, each in costs.items()
    ]
    trained = training_steps(large, prompts, training, lengths, segments, repeats)
    plots = (
        Plot("method", ("vs plain",), kind="bar", label="tau", reference=1.0),
        Plot("rows", ("vs one row",), table="Steps"),
        Plot("tokens", ("tokens/s",), hue="segments", table="Training", log="xy"),
    )
    return Result("A large target", rows, plots, {"Steps": steps, "Training": trained.rows})


@torch.inference_mode()
def measured_bandwidth(device: torch.device, size: int = 2**28, repeats: int = 10) -> float:
    """Bytes per second of a copy of `size` bytes, read and written, the best of some."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    (times,) = timed({"copy": lambda: copy.copy_(source)}, repeats, device).values()
    return 2 * size / min(times)


def context(
    target: Target, prompts: list[Prompt], lengths: list[int], row_counts: list[int], repeats: int
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
