"""Losses over the vocabulary, a slice of the rows at a time: never all of their logits.

With V tokens in the vocabulary, M rows have M * V logits: for streams, gamma + 1 times as many as
in ordinary training. So many rows come in slices, whose logits are made again in the backward pass.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.speculators.base import Batch, causal_rows
from slipstream.targets.target import Target

# So many bytes of float32 values are held at a time: a fiftieth of an accelerator's memory, and on
# a CPU what is soon written and read again.
SLICE_BYTES = {"cuda": 2**30, "cpu": 2**27}


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
