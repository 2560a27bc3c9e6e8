"""Host time of a decoding step: the layers return their input, the heads a fixed tensor.

What remains is what the host does for each step: drafting, masks, verification, commit, emission.
Run as `python -m studies.host_time`; prints the median step by nodes and batch size.
"""

import argparse
from itertools import product

import torch

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.streaming import Streaming
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from studies.timing import random_target, timed

PROMPT, WARM_UP = [1, 2, 3, 4, 5, 6, 7, 8], 10


def step_seconds(
    nodes: int, batch: int, steps: int, schedule: str = "deferred", temperature: float = 0.0
) -> float:
    """Median seconds of a step with trees of `nodes` for `batch` requests."""
    target = random_target(256, 8)
    logits = torch.randn(256, generator=torch.Generator().manual_seed(0))
    target.run_each = lambda *_: None
    target.logits = lambda states: logits.expand(*states.shape[:-1], -1)
    config = StreamingConfig(num_streams=4, num_msa_layers=2, adapter_rank=4, pruning_rank=4)
    drafter = Streaming(StreamingSpeculator(target, config), schedule, 4)
    limits = Limits(5 * (steps + 20))
    engine = Engine(target, drafter, Sampling(temperature), limits, nodes)
    engine.start([engine.request(PROMPT, seed) for seed in range(batch)])
    for _ in range(WARM_UP):
        engine.step()
    return timed({"step": engine.step}, steps, target.device)["step"]


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--schedule", default="deferred")
    arguments.add_argument("--temperature", type=float, default=0.0)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    print("nodes  batch  ms a step")
    for nodes, batch in product((12, 32, 64), (1, 8)):
        seconds = step_seconds(nodes, batch, given.steps, given.schedule, given.temperature)
        print(f"{nodes:5}  {batch:5}  {1000 * seconds:.2f}")
