"""What a forward of several rows costs on this device, against one row: why speculation pays."""

import statistics
import time

import torch

from slipstream.core.masks import tree_mask
from slipstream.core.tree import DraftTree
from slipstream.targets.target import Target

ROW_COUNTS = (1, 2, 4, 8, 16, 32)


@torch.inference_mode()
def row_costs(
    target: Target, committed: int = 96, repeats: int = 15, counts: tuple[int, ...] = ROW_COUNTS
) -> dict[int, float]:
    """Median seconds of a verifying forward (LM head included) by its number of rows.

    committed: tokens in the cache. Counts are interleaved, after a warm-up, and the device is
    synchronised, so that ratios are fair.
    """
    cache = target.new_cache(committed + max(counts))
    for keys, values in cache.layers:
        keys.zero_(), values.zero_()
    cache.lengths = [committed]
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for repeat in range(-2, repeats):
        for count in counts:
            started = time.perf_counter()
            _forward(target, count, cache)
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            if repeat >= 0:
                seconds[count].append(time.perf_counter() - started)
    return {count: statistics.median(times) for count, times in seconds.items()}


def _forward(target: Target, count: int, cache) -> None:
    tree = DraftTree.chain([0] * count)
    positions = torch.tensor([tree.depths()], device=target.device) + cache.length
    ids = torch.tensor([tree.tokens], device=target.device)
    mask = tree_mask(cache.lengths, tree.ancestor_mask().to(target.device)[None], cache.slots)
    target.logits(target.forward(ids, positions, mask, cache, repeats=True).hidden[0])
    cache.forget_staged()
