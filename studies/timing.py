"""How long calls take, and what is timed where no answer matters: a model of random weights, a
training step of random tokens. `gpu.py` is why it needs torch and transformers alone."""

import time
from collections.abc import Callable
from statistics import median

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from slipstream.data.batches import Batch, collate
from slipstream.data.rendering import Sample
from slipstream.speculators.base import DraftingSpeculator
from slipstream.targets.target import Target


def timed(
    calls: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of each call, all in turn, after a warm-up; an accelerator is waited for."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            wait()
            started = time.perf_counter()
            call()
            wait()
            if turn:
                times[name].append(time.perf_counter() - started)
    return {name: median(own) for name, own in times.items()}


def random_target(vocabulary: int, layers: int, device: torch.device | str = "cpu") -> Target:
    """A Llama of width 64 with random weights, which never ends an answer."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
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
