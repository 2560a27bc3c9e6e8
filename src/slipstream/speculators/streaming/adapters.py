"""What acts on stream rows alone: low-rank adapters, and rotated values (an ablation).

The target's modules are never changed: while streams run, forward hooks change the stream rows of
a linear's output, and every other row leaves bit for bit as it was. For a forward of stream rows
only (deferred streams) a second set of layers with the adapters merged into the weights is faster;
the hooks are its reference.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.targets.packed import (
    frozen_linear,
    fuse_linears,
    is_fused,
    is_packed,
    matrix_of,
    pack_linears,
    rounding_pays,
)
from slipstream.targets.rows import Rows
from slipstream.targets.target import Target, device_of


class LowRank(nn.Module):
    """x -> up(down(x)), down (rank, in), up (out, rank); zero at first."""

    def __init__(self, in_features: int, out_features: int, rank: int):
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, in_features))
        self.up = nn.Parameter(torch.zeros(out_features, rank))
        nn.init.normal_(self.down, std=in_features**-0.5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        return F.linear(F.linear(rows, self.down), self.up)


class StreamAdapters(nn.Module):
    """One `LowRank` per linear of the top layers of a target (and per MLP, where MLPs are skipped).

    Shapes are read off the target; its modules are not kept, so it is not saved with the adapters.
    """

    def __init__(self, target: Target, layers: range, rank: int, skip_mlp: bool):
        super().__init__()
        family, width = target.family, target.hidden_size
        names = family.attention_linears + (() if skip_mlp else family.mlp_linears)
        self.layers = nn.ModuleDict()
        for index in layers:
            layer = family.layers[index]
            shapes = {name: _shape(layer.get_submodule(name)) for name in names}
            if skip_mlp:
                shapes[family.mlp] = width, width
            self.layers[str(index)] = nn.ModuleDict(
                {name.replace(".", "/"): LowRank(*shape, rank) for name, shape in shapes.items()}
            )

    def _adapted(self, target: Target) -> Iterator[tuple[nn.Module, dict[str, LowRank]]]:
        """Each MSA layer of the target, and its adapters by the names of what they act on."""
        for index, adapters in self.layers.items():
            named = {key.replace("/", "."): adapter for key, adapter in adapters.items()}
            yield target.family.layers[int(index)], named

    def place(self, target: Target) -> None:
        """Move each adapter to where its layer of `target` runs."""
        for layer, adapters in self._adapted(target):
            for adapter in adapters.values():
                adapter.to(device_of(layer))

    @contextmanager
    def active(self, target: Target, rows: Rows) -> Iterator[None]:
        """Within, the adapters act on the stream rows of `rows` while these run in `target`."""
        with ExitStack() as hooks:
            for layer, adapters in self._adapted(target):
                for name, adapter in adapters.items():
                    hook = _hook_in_place_of if name == target.family.mlp else _hook_beside
                    for handle in hook(layer.get_submodule(name), adapter, rows):
                        hooks.enter_context(handle)
            yield

    @torch.no_grad()
    def merged_layers(self, target: Target) -> nn.ModuleList:
        """Copies of the MSA layers for stream rows only, with the adapters merged in; in 8 bits
        where that pays."""
        layers, config = nn.ModuleList(), target.model.config
        for original, adapters in self._adapted(target):
            # The same config: it says how these layers attend.
            layer = copy.deepcopy(original, {id(config): config})
            for name, adapter in adapters.items():
                if name == target.family.mlp:
                    pair = (frozen_linear(part.clone()) for part in (adapter.down, adapter.up))
                    layer.set_submodule(name, nn.Sequential(*pair).to(target.dtype))
                else:
                    layer.set_submodule(name, _merged(layer.get_submodule(name), adapter))
            rounded = rounding_pays(original, target.dtype)
            if rounded or is_fused(original):
                fuse_linears([layer], target.family.fused)
            if is_packed(original):
                pack_linears(layer, rounded)
            layers.append(layer)
        return layers.requires_grad_(False)


def _merged(module: nn.Module, adapter: LowRank) -> nn.Linear:
    """One linear layer that computes `module` and `adapter` together."""
    weight = matrix_of(module)
    precise = torch.promote_types(weight.dtype, torch.float32)
    merged = weight.to(precise) + adapter.up.to(precise) @ adapter.down.to(precise)
    return frozen_linear(merged.to(weight.dtype), module.bias)


def _shape(module: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear layer, also of GPT-2's Conv1D."""
    if hasattr(module, "in_features"):
        return module.in_features, module.out_features
    return module.nx, module.nf


def _here(hook: Callable) -> Callable:
    """`hook` in this thread alone: in another one the model may be at work on other rows."""
    thread = get_ident()
    return lambda *given: hook(*given) if get_ident() == thread else None


def _hook_beside(module: nn.Module, adapter: LowRank, rows: Rows) -> list:
    """Add the adapter's output to the stream rows of `module`'s output."""

    def add(_, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        first, shape = rows.num_nodes, output.shape
        if output.ndim == 2:  # OPT flattens (B, R) around its MLP
            inputs = [part.unflatten(0, (-1, rows.hidden.shape[1])) for part in inputs]
            output = output.unflatten(0, (-1, rows.hidden.shape[1]))
        streams = output[..., first:, :] + adapter(inputs[0][..., first:, :])
        if first:
            streams = torch.cat([output[..., :first, :], streams], dim=-2)
        return streams.view(shape)

    return [module.register_forward_hook(_here(add))]


def _hook_in_place_of(module: nn.Module, adapter: LowRank, rows: Rows) -> list:
    """Let `module` see main rows alone; stream rows get the adapter's output instead."""
    streams: list[torch.Tensor] = []

    def divide(_, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        streams.append(adapter(inputs[0][..., rows.num_nodes :, :]))
        # Of a batch a part of the rows lies in pieces, which GPT-2's Conv1D cannot take.
        return (inputs[0][..., : rows.num_nodes, :].contiguous(),)

    def join(_, __, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output, streams.pop()], dim=-2)

    before = module.register_forward_pre_hook(_here(divide))
    return [before, module.register_forward_hook(_here(join))]


def rotate(values: torch.Tensor, num_streams: int, step: float) -> torch.Tensor:
    """V_tn = V_t e^(i epsilon n) (appendix E.4, Eq. 8), the halves of a head as real and imaginary
    part. (..., P * gamma, H_kv, D_head): the values of stream n, turned by `step` * n."""
    count = values.shape[-3]
    angles = torch.arange(1, num_streams + 1, device=values.device).repeat(count // num_streams)
    angles = (angles * step).to(values.dtype)[:, None, None]
    real, imaginary = values.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)


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

    with ExitStack() as hooks:
        for layer in layers:
            linear = layer.get_submodule(family.value_linear)
            hooks.enter_context(linear.register_forward_hook(_here(turn)))
        yield
