"""What this device makes of a large target: decoding, rows, memory bandwidth and training."""

import time

import torch

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.comparison import compare, overall
from slipstream.evaluation.enlargement import LargeShape, enlarged_speculator, enlarged_target
from slipstream.evaluation.methods import Method, Plain, Speculative
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.row_cost import row_costs
from slipstream.evaluation.studies.findings import Findings
from slipstream.evaluation.studies.segments import SegmentStudy
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.targets.compiled import compile_like
from slipstream.targets.loading import DTYPES
from slipstream.targets.target import Target

COLUMNS = (
    "what", "setting", "tokens/s", "vs plain", "tau", "of bandwidth", "ms", "vs one row",
    "peak GiB", "identical",
)  # fmt: skip


class DeviceStudy:
    """The small target and its speculator, enlarged to `shape`: plain decoding, streams of both
    schedules with trees of each of `budgets` nodes, what a step of `row_counts` rows costs, and
    training steps over `lengths` tokens, dense and in `segments`.

    Bandwidth is that of copying within the device's memory, in this run; a step, drafting included,
    must read all weights but the embeddings once. Prefills are left out of both.
    """

    def __init__(
        self,
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
    ):
        self.speculator, self.shape, self.dtype = speculator, shape, DTYPES[dtype]
        self.budgets, self.top_k, self.row_counts = budgets, top_k, row_counts
        self.training = SegmentStudy(training, lengths, segments, repeats)
        self.repeats = repeats

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        large = enlarged_target(target, self.shape, self.dtype)
        compile_like(large, target)
        small = load_speculator(self.speculator, target)
        speculator = enlarged_speculator(small, target, large)
        rows = self._decoding(large, speculator, prompts)
        costs = row_costs(large, counts=tuple(self.row_counts))
        one = costs[self.row_counts[0]]
        for count, seconds in costs.items():
            values = {"ms": 1000 * seconds, "vs one row": seconds / one}
            rows.append(_row("step", f"{count} rows", **values))
        for found in self.training.run(large, prompts).rows:
            setting = f"{found['tokens']} tokens, {found['segments']} segments"
            values = {"tokens/s": found["tokens/s"], "peak GiB": found["peak MB"] * 1e6 / 2**30}
            rows.append(_row("training", setting, **values))
        return Findings("A large target", rows, lambda figure: _draw(figure, rows))

    def _decoding(self, large: Target, speculator, prompts: list[Prompt]) -> list[dict]:
        methods: dict[str, Method] = {"plain": Plain()}
        for schedule in ("fused", "deferred"):
            for nodes in self.budgets:
                drafter = Streaming(speculator, schedule, self.top_k)
                methods[f"{schedule}, {nodes} nodes"] = Speculative(drafter, nodes)
        runs = compare(methods, prompts, large, Sampling(), Limits(96), self.repeats, seed=0)
        records = overall(runs, prompts, str(large.dtype))
        read = sum(p.nbytes for p in large.family.layers.parameters()) + large.head.weight.nbytes
        bandwidth = measured_bandwidth(large.device)
        rows = []
        for name, record in records.items():
            seconds = (record.seconds - record.seconds_prefill) / record.target_forwards
            values = {
                "tokens/s": record.tokens_per_second,
                "vs plain": record.speedup_vs_plain,
                "tau": record.tau,
                "of bandwidth": read / seconds / bandwidth,
                "ms": 1000 * seconds,
                "identical": f"{record.identical}/{record.num_prompts}",
            }
            rows.append(_row("decoding", name, **values))
        return rows


@torch.inference_mode()
def measured_bandwidth(device: torch.device, size: int = 2**28, repeats: int = 10) -> float:
    """Bytes per second of a copy of `size` bytes, read and written, the best of some."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy, best = torch.empty_like(source), float("inf")
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        copy.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def _row(what: str, setting: str, **values) -> dict[str, object]:
    return {"what": what, "setting": setting} | {name: values.get(name) for name in COLUMNS[2:]}


def _draw(figure, rows: list[dict]) -> None:
    axes = figure.subplots(1, 3)
    columns = (("decoding", "vs plain"), ("step", "vs one row"), ("training", "tokens/s"))
    for part, (what, column) in zip(axes, columns, strict=True):
        chosen = [row for row in rows if row["what"] == what]
        part.barh([row["setting"] for row in chosen], [row[column] for row in chosen])
        part.set_title(f"{what}: {column}", fontsize=9)
        part.tick_params(labelsize=7)
        part.spines[["top", "right"]].set_visible(False)
