"""Memory and speed of a training step by length and number of segments (appendix I), and where the
streams' losses pull: gradient norms of the MLPs by layer (Figure 6)."""

import time
import weakref
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from rich.progress import track
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.data.batches import Batch, collate
from slipstream.data.rendering import Sample
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.segments import lossless_losses, shared_losses
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from studies import Plot, Prompt, Result, Target
from studies.decoding import answered


def segments(
    target: Target,
    prompts: list[Prompt],
    speculator: StreamingConfig,
    lengths: list[int],
    segments: list[int],
    repeats: int,
) -> Result:
    """Forward and backward of one sample of random tokens, a quarter of it prompt.

    The dense reference holds all streams of all completion positions at once, with one explicit
    mask through scaled_dot_product_attention. Memory is the peak of what the step's operators made
    (activations, masks, logits, gradients), counted storage by storage; weights are not in it.
    """
    streams = StreamingSpeculator(target, speculator).to(target.device)
    kinds: dict[str, int | None] = {"dense": None} | {str(count): count for count in segments}
    rows = []
    for length in track(lengths, description="lengths"):
        generator, peaks = torch.Generator().manual_seed(0), {}
        ids = torch.randint(target.vocab_size, (length,), generator=generator).tolist()
        batch = collate([Sample(ids, length // 4)]).to(target.device)
        step = partial(_step, target, streams, batch)
        steps = {name: partial(step, count) for name, count in kinds.items()}
        for name, step in steps.items():
            with PeakMemory() as memory:
                step()
            peaks[name] = memory.peak
        seconds = {name: median(own) for name, own in timed(steps, repeats, target.device).items()}
        rows += [
            {"tokens": length, "segments": name, "peak MB": peaks[name] / 1e6,
             "of dense": peaks[name] / peaks["dense"], "tokens/s": length / seconds[name],
             "speed vs dense": seconds["dense"] / seconds[name]}
            for name in kinds
        ]  # fmt: skip
    title = f"Segment attention, {speculator.mode} mode, {speculator.num_streams} streams"
    return Result(title, rows, (Plot("tokens", ("peak MB", "tokens/s"), "segments", log="xy"),))


def timed(
    calls: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each call, all in turn, `repeats` times; an accelerator is waited for."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            wait()
            started = time.perf_counter()
            call()
            wait()
            times[name].append(time.perf_counter() - started)
    return times


def _step(
    target: Target, speculator: StreamingSpeculator, batch: Batch, segments: int | None
) -> None:
    speculator.zero_grad(set_to_none=True)
    mixed = target.dtype == torch.bfloat16  # as in training: the speculator is float32
    with torch.autocast(target.device.type, torch.bfloat16, enabled=mixed):
        adapted = speculator.adapted(target)
        alphas = torch.ones(speculator.num_streams, device=target.device)
        if speculator.config.mode == "shared":
            losses = shared_losses(adapted, speculator, batch, 1.0, alphas, segments)
        else:
            losses = lossless_losses(adapted, speculator, batch, alphas, segments)
    losses.total.backward()


class PeakMemory(TorchDispatchMode):
    """Within, `peak` is the most bytes that tensors made here held at one time, on any device.

    Every operator's outputs count from when they are made until their storage is freed, those of
    the backward pass and of saved activations included; what was there before does not, nor do
    buffers that a kernel frees before it returns.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self._meet((args, kwargs), new=False)
        result = function(*args, **(kwargs or {}))
        self._meet(result, new=True)
        return result

    def _meet(self, tensors, new: bool) -> None:
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes() if new else 0
            if key not in self._known:
                self._known.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def gradients(
    target: Target, prompts: list[Prompt], speculator: StreamingConfig, trained: dict[str, str]
) -> Result:
    """Shared mode: norms over the prompts' answers, for untrained streams (`speculator` is their
    config) and for `trained` ones: names and folders of speculators of the same kind."""
    samples = answered(target, prompts)
    speculators = {"at the start": StreamingSpeculator(target, speculator).to(target.device)}
    speculators |= {name: load_speculator(folder, target) for name, folder in trained.items()}
    rows = []
    for name, own in speculators.items():
        both = [_norms(target, own, samples, of_streams) for of_streams in (True, False)]
        rows += [
            {"when": name, "layer": layer, "streams' losses": stream, "main loss": main}
            for layer, (stream, main) in enumerate(zip(*both, strict=True))
        ]
    plot = Plot("layer", (("streams' losses", "main loss"),), hue="when", log="y")
    return Result("Gradient norm of each layer's MLP (Figure 6)", rows, (plot,))


def _norms(
    target: Target, speculator: StreamingSpeculator, samples: list[Sample], of_streams: bool
) -> list[float]:
    """Per layer, the norm of the mean loss's gradient by the MLP's own weights."""
    adapted, linears = speculator.adapted(target), target.family.mlp_linears
    modules = [layer.get_submodule(name) for layer in adapted.family.layers for name in linears]
    weights = [getattr(module, "base_layer", module).weight for module in modules]
    alphas = torch.full((speculator.num_streams,), float(of_streams), device=target.device)
    for weight in weights:
        weight.requires_grad_(True)
        weight.grad = torch.zeros_like(weight)
    for sample in samples:
        batch = collate([sample]).to(target.device)
        loss = shared_losses(adapted, speculator, batch, float(not of_streams), alphas, None)
        (loss.total / len(samples)).backward(inputs=weights)
    squares = torch.stack([weight.grad.square().sum() for weight in weights])
    for weight in weights:
        weight.requires_grad_(False).grad = None
    return squares.unflatten(0, (-1, len(linears))).sum(1).sqrt().tolist()
