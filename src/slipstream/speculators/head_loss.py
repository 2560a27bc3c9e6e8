"""Cross-entropy through the LM head without ever holding all logits.

With V tokens in the vocabulary, M rows have M * V logits: for streams, gamma + 1 times as many as
in ordinary training. Here slices of the vocabulary come and go, in the forward and, recomputed, in
the backward pass. `F.cross_entropy` on all logits is the reference. It knows nothing of streams.
"""

import torch
import torch.nn.functional as F
from torch import nn

SLICE = 8192


def head_loss(
    head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor, slice_size: int = SLICE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each row, and the most probable token of each.

    head: an `nn.Linear` D -> V that is not trained (others are applied whole); hidden: (M, D) after
    the final norm; labels: (M,). Returns (M,) float losses and (M,) token ids.
    """
    plain = type(head) is nn.Linear and not head.weight.requires_grad
    if not plain or head.out_features <= slice_size:
        logits = head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(-1)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    else:
        dtype = hidden.dtype
    return _SlicedCrossEntropy.apply(hidden, head.weight, head.bias, labels, slice_size, dtype)


class _SlicedCrossEntropy(torch.autograd.Function):
    """loss = log sum_v exp(z_v) - z_label; its gradient by z is softmax(z) - onehot(label)."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, slice_size, dtype):
        precise = torch.promote_types(dtype, torch.float32)
        normaliser = hidden.new_full((len(hidden),), -torch.inf, dtype=precise)
        best, own = normaliser.clone(), torch.zeros_like(normaliser)
        best_token = torch.zeros_like(labels)
        for start, logits in _slices(hidden, weight, bias, slice_size, dtype):
            normaliser = torch.logaddexp(normaliser, logits.logsumexp(-1))
            top, token = logits.max(-1)
            best_token = torch.where(top > best, token + start, best_token)
            best = torch.maximum(best, top)
            rows, columns = _labelled(labels, start, logits)
            own[rows] = logits[rows, columns]
        ctx.save_for_backward(hidden, weight, bias, labels, normaliser)
        ctx.slice_size, ctx.dtype = slice_size, dtype
        ctx.mark_non_differentiable(best_token)
        return normaliser - own, best_token

    @staticmethod
    def backward(ctx, gradient, _):
        hidden, weight, bias, labels, normaliser = ctx.saved_tensors
        total = torch.zeros_like(hidden, dtype=normaliser.dtype)
        for start, logits in _slices(hidden, weight, bias, ctx.slice_size, ctx.dtype):
            softmax = (logits - normaliser[:, None]).exp()
            rows, columns = _labelled(labels, start, logits)
            softmax[rows, columns] -= 1
            softmax = (softmax * gradient[:, None]).to(ctx.dtype)
            total += softmax @ weight[start : start + logits.shape[1]].to(ctx.dtype)
        return total.to(hidden.dtype), None, None, None, None, None


def _slices(hidden, weight, bias, slice_size, dtype):
    """(first token, logits of a slice of the vocabulary), slice by slice."""
    precise = torch.promote_types(dtype, torch.float32)
    for start in range(0, len(weight), slice_size):
        part = slice(start, start + slice_size)
        with torch.autocast(hidden.device.type, enabled=False):
            logits = F.linear(hidden.to(dtype), weight[part].to(dtype)).to(precise)
        yield start, logits if bias is None else logits + bias[part]


def _labelled(labels, start, logits):
    """(rows whose label lies in this slice, their labels' columns)."""
    rows = ((labels >= start) & (labels < start + logits.shape[1])).nonzero()[:, 0]
    return rows, labels[rows] - start
