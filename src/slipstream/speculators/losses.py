"""What guesses of the coming tokens should be, and losses over the vocabulary.

With V tokens in the vocabulary, M rows have M * V logits: for streams, gamma + 1 times as many as
in ordinary training. So many rows come in slices, whose logits are made again in the backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.speculators.base import Batch, causal_rows
from slipstream.targets.rows import rows_at
from slipstream.targets.target import Target

NO_LABEL = -100
# So many bytes of float32 values are held at a time: a fiftieth of an accelerator's memory, and on
# a CPU what is soon written and read again.
SLICE_BYTES = {"cuda": 2**30, "cpu": 2**27}


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
    labels = rows_at(known[:, 1:].unfold(1, count + 1, 1), positions)
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


def in_slices(
    function: Callable[..., tuple[torch.Tensor, ...]], width: int, *rows: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Apply `function`, which may hold `width` values a row, to slices of M rows; returns M rows.

    function: takes a slice of each tensor in `rows`, of M rows each; it runs again for the
    backward pass, unless all rows are one slice.
    """
    held = SLICE_BYTES.get(rows[0].device.type, SLICE_BYTES["cpu"])
    most = max(1, held // (4 * width))
    if len(rows[0]) <= most:
        return function(*rows)
    slices = zip(*(tensor.split(most) for tensor in rows), strict=True)
    found = [checkpoint(function, *each, use_reentrant=False) for each in slices]
    return tuple(map(torch.cat, zip(*found, strict=True)))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(M, V) logits of any dtype, (M,) labels -> (M,) losses, computed in float32 at least."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(precise, labels, reduction="none")


def head_loss(
    head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each guess through an LM head D -> V, and the most probable token of each: (M,)
    floats and (M,) token ids. hidden: (M, D) after the final norm; labels: (M,)."""

    def of_slice(hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(hidden).to(hidden.device)
        return cross_entropy(logits, labels), logits.argmax(-1)

    return in_slices(of_slice, head.out_features, hidden, labels)


def completion_losses(target: Target, batch: Batch) -> torch.Tensor:
    """(M,) cross-entropies of the completion tokens, sample by sample."""
    predicts = batch.supervised[:, 1:]
    normed = target.norm(causal_rows(target, batch.ids).hidden[:, :-1][predicts])
    return head_loss(target.head, normed, batch.ids[:, 1:][predicts])[0]
