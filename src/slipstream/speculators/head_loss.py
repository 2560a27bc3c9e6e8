"""Cross-entropy of guesses without ever holding all of their logits.

With V tokens in the vocabulary, M rows have M * V logits: for streams, gamma + 1 times as many as
in ordinary training. So many rows come in parts, whose logits are made again in the backward pass.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# So many logits are held at a time.
LOGITS = 2**25


def guess_loss(
    logits_of: Callable[..., torch.Tensor], vocab_size: int, labels: torch.Tensor, *rows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each guess, and the most probable token of each: (M,) floats and (M,) token ids.

    logits_of: takes a part of each tensor in `rows`, of M rows each, and returns the part's
    (..., V) logits; labels: (M,).
    """

    def part(labels, *rows):
        logits = logits_of(*rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(-1)

    most = max(1, LOGITS // vocab_size)
    if len(labels) <= most:
        return part(labels, *rows)
    parts = zip(*(tensor.split(most) for tensor in (labels, *rows)), strict=True)
    found = [checkpoint(part, *each, use_reentrant=False) for each in parts]
    losses, guesses = zip(*found, strict=True)
    return torch.cat(losses), torch.cat(guesses)


def head_loss(
    head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`guess_loss` through an LM head D -> V; hidden: (M, D) after the final norm."""
    return guess_loss(head, head.out_features, labels, hidden)
