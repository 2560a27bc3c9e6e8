"""Which positions are trained on, and what a guess of each of the coming tokens should be.

Pure tensor functions; they know nothing of models or Lightning.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slipstream.speculators.base import Batch

NO_LABEL = -100


@dataclass
class Future:
    """positions: (B, P) rows that are trained on, padded with 0; next_tokens: (B, P) what the main
    row predicts; tokens: (B, P, count) what comes after that; `NO_LABEL` for none."""

    positions: torch.Tensor
    next_tokens: torch.Tensor
    tokens: torch.Tensor

    def segments(self, num_segments: int | None) -> list[slice]:
        """The columns of the positions, in `num_segments` parts (None: one), of which none is empty
        where there are as many columns."""
        count = self.positions.shape[1]
        parts = min(num_segments or 1, count)
        return [slice(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def future_tokens(batch: Batch, count: int, least: int = 1) -> Future:
    """Rows from which completion tokens are predicted (the last prompt token and after); guess j
    at row t is of token t + 1 + j, if it is of the same completion. least: positions that there
    are at least; what is beyond the completion has no tokens.

    Example: ids [5, 6, 7, 8] with 7 and 8 supervised, count 2: positions [1, 2], next tokens
    [7, 8], tokens [[8, none], [none, none]].
    """
    predicts = F.pad(batch.supervised[:, 1:], (0, least))
    most = max(least, int(predicts.sum(1).max()))
    order = predicts.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    valid = predicts.gather(1, order)
    positions = torch.where(valid, order, 0)
    known = torch.where(batch.supervised, batch.ids, NO_LABEL)
    known = F.pad(known, (0, count + 1), value=NO_LABEL)
    offsets = torch.arange(1, count + 2, device=positions.device)
    ahead = (positions.unsqueeze(-1) + offsets).flatten(1)
    labels = known.gather(1, ahead).view(*positions.shape, count + 1)
    ended = (labels == NO_LABEL).cumsum(-1) > 0  # no guess looks beyond the end of its answer
    labels = labels.masked_fill(ended | ~valid.unsqueeze(-1), NO_LABEL)
    return Future(positions, labels[..., 0], labels[..., 1:])


def guess_means(
    losses: torch.Tensor, accuracies: torch.Tensor, name: str
) -> dict[str, torch.Tensor]:
    """What is logged of guesses, (count,) mean losses and accuracies: each, and their means."""
    means = {"loss": losses.mean(), "accuracy": accuracies.mean()}
    for number, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True), start=1):
        means |= {f"loss_{name}_{number}": loss, f"accuracy_{name}_{number}": accuracy}
    return means
