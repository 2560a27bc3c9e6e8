"""Streams told apart by rotated values instead of by embeddings (appendix E.4, Eq. 8).

An ablation of the paper: V_tn = V_t e^(i epsilon n), the two halves of a head read as real and
imaginary part. Only stream rows are touched.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from slipstream.targets.rows import Rows
from slipstream.targets.target import Target


def rotate(values: torch.Tensor, num_streams: int, step: float) -> torch.Tensor:
    """(..., P * gamma, H_kv, D_head): the values of stream n, turned by `step` * n."""
    count = values.shape[-3]
    angles = torch.arange(1, num_streams + 1, device=values.device).repeat(count // num_streams)
    angles = (angles * step).to(values.dtype)[:, None, None]
    real, imaginary = values.chunk(2, dim=-1)
    return torch.cat(
        [
            real * angles.cos() - imaginary * angles.sin(),
            real * angles.sin() + imaginary * angles.cos(),
        ],
        dim=-1,
    )


@contextmanager
def rotating(
    target: Target, layers: list[nn.Module], rows: Rows, num_streams: int, step: float
) -> Iterator[None]:
    """Within, values of the stream rows of `rows` are rotated while they run in `layers`."""
    family = target.family

    def turn(_, __, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        values = family.values_of(output)[..., rows.num_nodes :, :, :]
        values.copy_(rotate(values, num_streams, step))
        return output

    handles = [
        layer.get_submodule(family.value_linear).register_forward_hook(turn) for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
