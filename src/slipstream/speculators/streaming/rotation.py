"""Streams told apart by rotated values instead of by embeddings (appendix E.4, Eq. 8).

An ablation of the paper: V_tn = V_t e^(i epsilon n), the two halves of a head read as real and
imaginary part. Only stream rows are touched.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from slipstream.targets.target import Rows, Target


def rotate(values: torch.Tensor, head_size: int, num_streams: int, step: float) -> torch.Tensor:
    """(..., P * gamma, H_kv * D_head): the values of stream n, turned by `step` * n."""
    count = values.shape[-2]
    angles = torch.arange(1, num_streams + 1, device=values.device).repeat(count // num_streams)
    angles = (angles * step).to(values.dtype)[:, None, None]
    real, imaginary = values.unflatten(-1, (-1, head_size)).chunk(2, dim=-1)
    turned = torch.cat(
        [
            real * angles.cos() - imaginary * angles.sin(),
            real * angles.sin() + imaginary * angles.cos(),
        ],
        dim=-1,
    )
    return turned.flatten(-2)


@contextmanager
def rotating(
    target: Target, layers: list[nn.Module], rows: Rows, num_streams: int, step: float
) -> Iterator[None]:
    """Within, values of the stream rows of `rows` are rotated while they run in `layers`."""
    heads, size = target.family.cache_shape

    def turn(_, __, output: torch.Tensor) -> torch.Tensor:
        first, width = rows.num_nodes, heads * size
        streams = output[..., first:, :]
        values = rotate(streams[..., -width:], size, num_streams, step)
        streams = torch.cat([streams[..., :-width], values], dim=-1)
        return torch.cat([output[..., :first, :], streams], dim=-2)

    handles = [
        layer.get_submodule(target.family.value_linear).register_forward_hook(turn)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
