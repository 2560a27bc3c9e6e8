"""What a forward of several rows costs on this device, against one row: why speculation pays."""

import statistics
import time
from itertools import product

import torch

from slipstream.core.device import wait_for
from slipstream.core.drafts import Draft
from slipstream.core.sampling import Sampling
from slipstream.core.trees import Trees
from slipstream.decoding.engine import verified_rows
from slipstream.targets.target import Target

ROW_COUNTS = (1, 2, 4, 8, 16, 32)
# Steps of as many rows that follow each other, as in decoding; the first of them is not counted.
RUN = 5


@torch.inference_mode()
def row_costs(
    target: Target, committed: int = 96, repeats: int = 15, counts: tuple[int, ...] = ROW_COUNTS
) -> dict[int, float]:
    """Median seconds of a verifying forward by its number of rows: what the engine runs for chains
    of as many tokens, the choice of the next ones included.

    committed: tokens in the cache. Runs of `RUN` steps of each count are interleaved, at least
    `repeats` steps of each being counted, and the device is synchronised, so that ratios are fair.
    """
    cache = target.new_cache(committed + max(counts))
    cache.settle([committed])
    level, samplings = cache.level and target.compiled is None, (Sampling(),)
    room = torch.full((1,), max(counts), device=target.device)
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    rounds = range(-(-repeats // RUN) + 1)
    for turn, count, step in product(rounds, counts, range(RUN + 1)):
        trees = Trees.of([Draft.chain([0] * count)], target.device).alike(count)
        settings = target, (), trees.depth, cache.slots, level, samplings
        given = trees.tokens, trees.parents, trees.confidences, cache.ends, room
        started = time.perf_counter()
        target.replayed(verified_rows, settings, *given, cache=cache)
        cache.forget_staged()
        wait_for(target.device)
        if turn and step:
            seconds[count].append(time.perf_counter() - started)
    return {count: statistics.median(times) for count, times in seconds.items()}
