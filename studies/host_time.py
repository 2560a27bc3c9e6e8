"""Host time of a decoding step: the layers return their input, the heads a fixed tensor.

What remains is what the host does for each step: drafting, masks, verification, commit, emission.
Run as `python studies/host_time.py`; prints the median step by nodes and batch size.
"""

import argparse
import time
from statistics import median

import torch

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.streaming import Streaming
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.target import Target

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def stubbed_target(vocabulary: int = 256, hidden: int = 64) -> Target:
    """A target whose layers and heads cost nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden,
        num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    target = Target(AutoModelForCausalLM.from_config(config).eval().requires_grad_(False))
    target.model.generation_config.eos_token_id = None
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))
    target.run_modules = lambda modules, rows, cache: rows
    target.logits = lambda states: logits.expand(*states.shape[:-1], -1)
    return target


def step_seconds(
    nodes: int, batch: int, steps: int, schedule: str = "deferred", temperature: float = 0.0
) -> float:
    """Median seconds of a step with trees of `nodes` for `batch` requests."""
    target = stubbed_target()
    config = StreamingConfig(num_streams=4, num_msa_layers=2, adapter_rank=4, pruning_rank=4)
    drafter = Streaming(StreamingSpeculator(target, config), schedule, 4)
    limits = Limits(5 * (steps + 20))
    engine = Engine(target, drafter, Sampling(temperature), limits, nodes)
    engine.start([engine.request(PROMPT, seed) for seed in range(batch)])
    found = []
    for _ in range(steps + 10):
        started = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - started)
    return median(found[10:])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--schedule", default="deferred")
    arguments.add_argument("--temperature", type=float, default=0.0)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    print("nodes  batch  ms a step")
    for nodes in (12, 32, 64):
        for batch in (1, 8):
            seconds = step_seconds(nodes, batch, given.steps, given.schedule, given.temperature)
            print(f"{nodes:5}  {batch:5}  {1000 * seconds:.2f}")


if __name__ == "__main__":
    main()
