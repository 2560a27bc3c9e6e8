"""How long calls take, and what is timed where no answer matters: a model of random weights, a
training step of random tokens. `gpu.py` is why it needs torch and transformers alone."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from slipstream.data.batches import Batch, collate
from slipstream.data.rendering import Sample
from slipstream.speculators.base import DraftingSpeculator
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.compiled import compile_target
from slipstream.targets.packed import unpack_linears
from slipstream.targets.target import Target
from studies import Rows

# The recipe that ships, conf/speculator/streaming.yaml; and the same without scores of pairs.
RECIPE = StreamingConfig(
    num_streams=6, adapter_rank=64, root_rank=384, transition_rank=64, copy_scores=True
)
RECIPES = {"yes": RECIPE, "no": replace(RECIPE, transition_rank=0, copy_scores=False)}


def timed(
    calls: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of each call, all in turn, after a warm-up; on a GPU by its own clock, which
    what the host does before and after has no part in."""
    seconds = _on_gpu if device.type == "cuda" else _on_host
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return {name: median(own[1:]) for name, own in times.items()}


def _on_host(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _on_gpu(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def measured_bandwidth(device: torch.device, size: int, repeats: int) -> float:
    """Bytes per second of a copy of `size` bytes within the device, read and written."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * size / timed({"copy": lambda: copy.copy_(source)}, repeats, device)["copy"]


def random_target(
    vocabulary: int, layers: int, device: torch.device | str = "cpu", width: int = 64
) -> Target:
    """A Llama with random weights, which never ends an answer."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width, num_hidden_layers=layers,
        num_attention_heads=width // 16, num_key_value_heads=2, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(device).eval().requires_grad_(False)
    return Target(model, name=f"random-{vocabulary}")


def random_batch(vocab_size: int, count: int, length: int) -> Batch:
    """`count` samples of random tokens, a quarter of each its prompt."""
    ids = torch.randint(vocab_size, (count, length), generator=torch.Generator().manual_seed(0))
    return collate([Sample(row, length // 4) for row in ids.tolist()])


def training_step(
    target: Target, speculator: DraftingSpeculator, batch: Batch, num_segments: int | None
) -> None:
    """Forward and backward of a batch; over a bfloat16 target mixed, as in training: the speculator
    is float32."""
    speculator.zero_grad(set_to_none=True)
    mixed = target.dtype == torch.bfloat16
    with torch.autocast(target.device.type, torch.bfloat16, enabled=mixed):
        loss, _ = speculator.losses(target, batch, num_segments=num_segments)
    loss.backward()


def training_steps(target: Target, lengths: Sequence[int], repeats: int) -> Rows:
    """Forward and backward of one sample of random tokens by number of segments, with scores of
    pairs and without, in turn; as `train.py` opens targets, not fused."""
    on_gpu, peaks = target.device.type == "cuda", {}
    unpack_linears(compile_target(target, "off").model)
    speculators = {
        scores: StreamingSpeculator(target, config).to(target.device)
        for scores, config in RECIPES.items()
    }
    steps = {}
    for scores, length, segments in product(speculators, lengths, (1, 4)):
        batch = random_batch(target.vocab_size, 1, length).to(target.device)
        step = partial(training_step, target, speculators[scores], batch, segments)
        steps[scores, length, segments] = step
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            step()
            peaks[scores, length, segments] = torch.cuda.max_memory_allocated() / 2**30
            speculators[scores].zero_grad(set_to_none=True)
    return [
        {"pair scores": key[0], "tokens": key[1], "segments": key[2], "seconds": seconds,
         "tokens/s": key[1] / seconds, "peak GiB": peaks.get(key)}
        for key, seconds in timed(steps, repeats, target.device).items()
    ]  # fmt: skip
