"""Memory and speed of a training step by length and number of segments (appendix I)."""

import time

import torch
from rich.progress import track

from slipstream.data.batches import Batch, collate
from slipstream.data.rendering import Sample
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.evaluation.studies.memory import PeakMemory
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.losses import StreamLosses
from slipstream.speculators.streaming.segments import lossless_losses, shared_losses
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.target import Target

DENSE = "dense"


class SegmentStudy:
    """Forward and backward of one sample of random tokens, a quarter of it prompt.

    The dense reference holds all streams of all completion positions at once, with one explicit
    mask through scaled_dot_product_attention. Memory is the peak of what the step's operators made
    (activations, masks, logits, gradients), counted storage by storage; weights are not in it.
    """

    def __init__(
        self, speculator: StreamingConfig, lengths: list[int], segments: list[int], repeats: int
    ):
        self.config, self.lengths, self.segments = speculator, lengths, segments
        self.repeats = repeats

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        speculator = StreamingSpeculator(target, self.config).to(target.device)
        kinds: list[int | None] = [None, *self.segments]
        rows = []
        for length in track(self.lengths, description="lengths"):
            batch = sample_of(length, target.vocab_size).to(target.device)
            memory = {kind: self._peak(target, speculator, batch, kind) for kind in kinds}
            seconds = self._seconds(target, speculator, batch, kinds)
            for kind in kinds:
                rows.append(
                    {
                        "tokens": length,
                        "segments": DENSE if kind is None else kind,
                        "peak MB": memory[kind] / 1e6,
                        "of dense": memory[kind] / memory[None],
                        "tokens/s": length / seconds[kind],
                        "speed vs dense": seconds[None] / seconds[kind],
                    }
                )
        title = f"Segment attention, {self.config.mode} mode, {self.config.num_streams} streams"
        return Findings(title, rows, lambda figure: _draw(figure, rows))

    def _losses(self, target, speculator, batch: Batch, segments: int | None) -> StreamLosses:
        adapted = speculator.adapted(target)
        alphas = torch.ones(speculator.num_streams, device=target.device)
        if self.config.mode == "shared":
            return shared_losses(adapted, speculator, batch, 1.0, alphas, segments)
        return lossless_losses(adapted, speculator, batch, alphas, segments)

    def _step(self, target, speculator, batch: Batch, segments: int | None) -> None:
        speculator.zero_grad(set_to_none=True)
        mixed = target.dtype == torch.bfloat16  # as in training: the speculator is float32
        with torch.autocast(target.device.type, torch.bfloat16, enabled=mixed):
            loss = self._losses(target, speculator, batch, segments).total
        loss.backward()

    def _peak(self, target, speculator, batch: Batch, segments: int | None) -> int:
        with PeakMemory() as memory:
            self._step(target, speculator, batch, segments)
        return memory.peak

    def _seconds(
        self, target, speculator, batch: Batch, kinds: list[int | None]
    ) -> dict[int | None, float]:
        """Median seconds of a step of each kind, interleaved."""
        times: dict[int | None, list[float]] = {kind: [] for kind in kinds}
        for _ in range(self.repeats):
            for kind in kinds:
                started = time.perf_counter()
                self._step(target, speculator, batch, kind)
                if target.device.type == "cuda":
                    torch.cuda.synchronize()
                times[kind].append(time.perf_counter() - started)
        return {kind: sorted(runs)[len(runs) // 2] for kind, runs in times.items()}


def sample_of(length: int, vocabulary: int) -> Batch:
    """One sample of random tokens whose last three quarters are supervised."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (length,), generator=generator).tolist()
    return collate([Sample(ids, length // 4)])


def _draw(figure, rows: list[dict[str, object]]) -> None:
    axes = figure.subplots(1, 2)
    kinds = list(dict.fromkeys(row["segments"] for row in rows))
    for kind in kinds:
        chosen = [row for row in rows if row["segments"] == kind]
        lengths = [row["tokens"] for row in chosen]
        label = kind if kind == DENSE else f"{kind} segments"
        axes[0].plot(lengths, [row["peak MB"] for row in chosen], marker="o", label=label)
        axes[1].plot(lengths, [row["tokens/s"] for row in chosen], marker="o", label=label)
    for place, name in enumerate(("peak memory of a step, MB", "tokens per second")):
        axes[place].set_xscale("log", base=2)
        axes[place].set_yscale("log")
        axes[place].set_xlabel("tokens of the sample")
        axes[place].set_title(name)
        axes[place].spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8)
