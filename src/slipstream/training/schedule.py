"""The learning-rate schedule shared by all recipes: linear warm-up, then linear decay to zero."""

import math

import lightning as L
import torch

from slipstream.core.errors import InputError


def linear_schedule(
    optimizer: torch.optim.Optimizer, warmup_steps: int, total_steps: int
) -> dict[str, object]:
    """Lightning's scheduler entry; the factor is 1 at `warmup_steps` and 0 at `total_steps`.

    Example: warmup 2, total 6 gives factors 0.5, 1, 1, 0.75, 0.5, 0.25 for steps 0..5.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"scheduler": scheduler, "interval": "step"}


def total_steps(trainer: L.Trainer, num_batches: int) -> int:
    """Optimiser steps of the whole run, `num_batches` batches an epoch.

    Lightning's own `estimated_stepping_batches` sets the loader up too early: a run resumed in the
    middle of an epoch would then start the epoch again.
    """
    steps = trainer.max_steps if trainer.max_steps >= 0 else math.inf
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        per_epoch = math.ceil(num_batches / trainer.accumulate_grad_batches)
        steps = min(steps, per_epoch * trainer.max_epochs)
    if steps == math.inf:
        raise InputError("trainer.max_epochs, trainer.max_steps: set one of them")
    return steps
