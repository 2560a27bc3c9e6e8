"""Data-parallel training: what the processes of a run must know of one another."""

import os
from contextvars import ContextVar

import torch
import torch.distributed as dist

ALONE = ContextVar("alone", default=False)
"""Whether this process works by itself: it neither waits for others nor asks them."""


def num_processes() -> int:
    """How many processes train together."""
    together = dist.is_available() and dist.is_initialized() and not ALONE.get()
    return dist.get_world_size() if together else 1


def process_rank() -> int:
    """The number of this one, from 0."""
    return dist.get_rank() if num_processes() > 1 else 0


def launched() -> tuple[int, int]:
    """(number, count) of the processes that torchrun started, which may not train together yet;
    (0, 1) without it."""
    if "RANK" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def mean_over_processes(count: torch.Tensor) -> torch.Tensor:
    """The mean of a count over all processes: losses divided by it have gradients whose mean over
    the processes is that of the whole batch, however unevenly it is spread."""
    if num_processes() == 1:
        return count
    total = count.float()
    dist.all_reduce(total)
    return total / num_processes()
