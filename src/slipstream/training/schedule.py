"""The learning-rate schedule shared by all recipes: linear warm-up, then linear decay to zero."""

import torch


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
