"""Memory and speed of a training step by length and number of segments (appendix I), the estimate
of its memory beside what a process takes, and where the streams' losses pull: gradient norms of the
MLPs by layer (Figure 6)."""

import ctypes
import multiprocessing
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from rich.progress import track
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.core.settings import Count, Text
from slipstream.data.batches import collate
from slipstream.data.rendering import Sample
from slipstream.speculators.base import new_speculator
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.segments import shared_losses
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.training.memory import GIB, MemoryEstimate, PeakMemory, empty_target, step_bytes
from slipstream.training.speculator import losses_of
from studies import Plot, Prompt, Result, Target
from studies.decoding import answered
from studies.timing import random_batch, random_target, timed, training_step, training_steps


def segments(
    target: Target,
    prompts: list[Prompt],
    speculator: StreamingConfig,
    lengths: Sequence[Count],
    segments: Sequence[Count],
    repeats: Count,
) -> Result:
    """Forward and backward of one sample of random tokens, a quarter of it prompt; 'dense' holds
    all streams of all completion positions at once. Memory is the peak of what the step's operators
    made, counted storage by storage; weights are not in it.
    """
    streams = StreamingSpeculator(target, speculator).to(target.device)
    kinds: dict[str, int | None] = {"dense": None} | {str(count): count for count in segments}
    rows = []
    for length in track(lengths, description="lengths"):
        batch, peaks = random_batch(target.vocab_size, 1, length).to(target.device), {}
        step = partial(training_step, target, streams, batch)
        steps = {name: partial(step, count) for name, count in kinds.items()}
        for name, step in steps.items():
            with PeakMemory() as memory:
                step()
            peaks[name] = memory.peak
        seconds = timed(steps, repeats, target.device)
        rows += [
            {"tokens": length, "segments": name, "peak MB": peaks[name] / 1e6,
             "of dense": peaks[name] / peaks["dense"], "tokens/s": length / seconds[name],
             "speed vs dense": seconds["dense"] / seconds[name]}
            for name in kinds
        ]  # fmt: skip
    title = f"Segment attention, {speculator.mode} mode, {speculator.num_streams} streams"
    return Result(title, rows, (Plot("tokens", ("peak MB", "tokens/s"), "segments", log="xy"),))


def pair_scores(
    target: Target,
    prompts: list[Prompt],
    vocabulary: Count,
    width: Count,
    layers: Count,
    lengths: Sequence[Count],
    repeats: Count,
) -> Result:
    """What scores of pairs add to a training step of the shipped recipe, beside a target of random
    weights, as wide as a real one, with `layers` layers and a large vocabulary, whose logits are
    most of the work. (Beside a narrow target they cost far more: a pair's score is as much work as
    a logit of 64 numbers.)"""
    large = random_target(vocabulary, layers, target.device, width)
    rows = training_steps(large, lengths, repeats)
    known = "tokens", "segments"
    plain = {tuple(row[k] for k in known): row for row in rows if row["pair scores"] == "no"}
    for row in rows:
        row["vs without"] = row["seconds"] / plain[tuple(row[k] for k in known)]["seconds"]
    return Result(f"A training step with {vocabulary:,} tokens, with scores of pairs", rows)


def memory(
    target: Target,
    prompts: list[Prompt],
    speculator: StreamingConfig,
    models: list[dict],
    num_segments: Count | None,
) -> Result:
    """The estimate of a run's peak memory for `models` of random weights in bfloat16, from their
    configs alone; and, of those of which `measured` says so, what a new process takes.

    models: name, measured, batch_size and length (tokens of each sample, a quarter of it prompt),
    and a transformers config. Measured: the most resident memory of a process that makes two
    optimiser steps on the CPU, less what it had before there was a model.
    """
    rows, known = [], ("name", "measured", "batch_size", "length")
    for model in track(models, description="models"):
        shape = {key: value for key, value in model.items() if key not in known}
        name, measured, *sizes = (model[key] for key in known)
        settings = shape, speculator, num_segments, *sizes
        found = estimated(*settings)
        row = {"model": name, "tokens": sizes[0] * sizes[1], "estimate GiB": found.total / GIB}
        row |= {f"{part} GiB": size / GIB for part, size in vars(found).items()}
        row |= {"measured GiB": None, "estimate of measured": None}
        if measured:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                taken = pool.apply(taken_by_steps, settings)
            row |= {"measured GiB": taken / GIB, "estimate of measured": found.total / taken}
        rows.append(row)
    return Result("Peak memory of training, estimated and measured", rows)


def estimated(
    shape: dict, speculator: StreamingConfig, num_segments: int | None, count: int, length: int
) -> MemoryEstimate:
    """The estimate for training a speculator for a bfloat16 model, from its shape alone."""
    config = AutoConfig.for_model(**shape, max_position_embeddings=length)
    with FakeTensorMode():
        target = empty_target(config, torch.bfloat16)
        own = new_speculator(target, speculator)
    trained = sum(p.nbytes for p in own.parameters() if p.requires_grad)
    weights = sum(p.nbytes for p in target.model.parameters()) + trained
    step = step_bytes(
        lambda: losses_of(empty_target(config, torch.bfloat16), speculator, num_segments),
        random_batch(config.vocab_size, count, length),
        mixed=True,
    )
    return MemoryEstimate(weights, 2 * trained, step)


def taken_by_steps(
    shape: dict, speculator: StreamingConfig, num_segments: int | None, count: int, length: int
) -> int:
    """Bytes that two steps of the same training take in this process, which must be a new one."""
    _return_freed_memory()
    before = _most_resident()
    config = AutoConfig.for_model(**shape, max_position_embeddings=length)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    target = Target(model.eval().requires_grad_(False))
    own = new_speculator(target, speculator)
    optimizer = torch.optim.AdamW(own.parameters())
    batch = random_batch(config.vocab_size, count, length)
    for _ in range(2):
        training_step(target, own, batch, num_segments)
        optimizer.step()
    return _most_resident() - before


def _return_freed_memory() -> None:
    """Let blocks of half a MiB and more go back to the system when they are freed, for a
    measurement: PyTorch's allocator on a CPU leaves it to glibc, which keeps most in pieces."""
    threshold, size = -3, 2**19  # M_MMAP_THRESHOLD of mallopt(3)
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(threshold, size)


def _most_resident() -> int:
    """Bytes of memory that this process had at most so far (on Linux)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def gradients(
    target: Target, prompts: list[Prompt], speculator: StreamingConfig, trained: dict[str, Text]
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
