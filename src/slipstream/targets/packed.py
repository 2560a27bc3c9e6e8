"""Linears whose weights are laid out for decoding: reordered on a CPU, fused on a GPU.

On many CPUs a forward of eight rows costs about twice a forward of one with ordinary linears, and
about the same with reordered weights, which is what makes verifying several tokens at once pay
there. On others ordinary products are faster, so both are measured (`reordering_pays`). The plain
linears are the reference (results differ by rounding, about 2e-6 in float32) and the fallback where
oneDNN has no such operator.

A GPU reads weights faster in one large product than in several small ones, so linears with the same
input (query, key and value; gate and up) become one.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterable
from functools import cache
from itertools import accumulate
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import nn

log = logging.getLogger(__name__)
ROWS_TO_OPTIMISE_FOR = 8
MEASURED_NUMBERS, TURNS, MARGIN = 2**24, 5, 0.9
"""Products are timed with at most MEASURED_NUMBERS weights (more than a core's own cache holds),
TURNS times; weights keep their order where that takes less than MARGIN of the reordered time."""
DIGITS = 5
"""Numbers of rows are padded up to this many significant binary digits, by a sixteenth at most:
oneDNN compiles a kernel for each number of rows and keeps it, and for the prompts of a server these
would add up to hundreds of MiB."""


class PackedLinear(nn.Module):
    """A frozen linear layer (in -> out) with a reordered weight; inference only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        # A plain attribute: an opaque oneDNN tensor cannot be moved, saved or cast.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(
            weight.detach().contiguous(), ROWS_TO_OPTIMISE_FOR
        )

    @property
    def weight(self) -> torch.Tensor:
        """The (out, in) matrix in its ordinary layout, bit for bit; a new tensor each time."""
        return self.packed.to_dense()

    def __deepcopy__(self, _: dict) -> "PackedLinear":
        return PackedLinear(self.weight, None if self.bias is None else self.bias.clone())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        shape, count = rows.shape[:-1], rows.shape[:-1].numel()
        missing = -count % (1 << count.bit_length() - DIGITS) if count >> DIGITS else 0
        if missing:
            rows = F.pad(rows.reshape(count, -1), (0, 0, 0, missing))
        found = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return found[:count].unflatten(0, shape) if missing else found


class RoundedLinear(nn.Module):
    """A frozen linear layer (in -> out) of 8-bit weights and inputs: it reads half of what bfloat16
    weights take. For drafts, which need not be exact; weights and inputs have one scale a row, so
    that no row is coarser for what stands in another."""

    SIZE, ZERO = 127, 128

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        weight = weight.detach().float().contiguous()
        scales = weight.abs().amax(1).clamp(min=1e-12) / self.SIZE
        rounded = (weight / scales[:, None]).round().to(torch.int8)
        shape = [ROWS_TO_OPTIMISE_FOR, self.in_features]
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, shape)
        self.scales, self.zeros = scales, torch.zeros(self.out_features, dtype=torch.long)
        self.bias = None if bias is None else bias.detach().float()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        precise = rows.float()
        scales = precise.abs().amax(-1, keepdim=True).clamp_(min=1e-12) / self.SIZE
        # What is cut off after the point rounds to the nearest.
        rounded = (precise / scales).add_(self.ZERO + 0.5).to(torch.uint8)
        found = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, self.ZERO, self.packed, self.scales, self.zeros,
            None, 1.0, 0, rows.dtype, "none", [], "",
        )  # fmt: skip
        found = found.mul_(scales.to(rows.dtype))
        return found if self.bias is None else found.add_(self.bias)


def rounding_available() -> bool:
    """Whether this build of torch and this processor multiply 8-bit numbers fast."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


def rounding_pays(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether copies of `module` that serve drafts alone are best rounded: a packed module of
    bfloat16. (Float32 is for small or exact models.)"""
    return dtype == torch.bfloat16 and is_packed(module) and rounding_available()


def packing_available(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this processor can reorder weights of `dtype`."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def pack_linears(module: nn.Module, rounded: bool = False) -> None:
    """Replace every linear below `module` (also GPT-2's Conv1D) by a packed one, or one of 8 bits.

    The replaced weights are dropped, so the model is for decoding only from here on. Linears of
    other libraries (quantised ones) and weights of other types are left alone.
    """
    kind = RoundedLinear if rounded else PackedLinear
    for name, child in _ordinary(module):
        module.set_submodule(name, kind(matrix_of(child), child.bias))


def _ordinary(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The linears below `module` that can be packed, and their names."""
    from transformers.pytorch_utils import Conv1D

    return [
        (name, child)
        for name, child in module.named_modules()
        if name and type(child) in (nn.Linear, Conv1D) and packing_available(child.weight.dtype)
    ]


def reordering_pays(module: nn.Module) -> bool:
    """Whether this machine multiplies faster with the weights of the linears below `module` once
    they are reordered: one row and `ROWS_TO_OPTIMISE_FOR` rows, measured once for all models of the
    same shapes. Says so where it does not."""
    weights = [matrix_of(child) for _, child in _ordinary(module)]
    if not weights:
        return True  # nothing is reordered
    sizes = [*accumulate(weight.numel() for weight in weights)]
    some = weights[: max(1, bisect_right(sizes, MEASURED_NUMBERS))]
    share = _share_of_time(tuple(weight.shape for weight in some), weights[0].dtype)
    if share < MARGIN:
        log.info("Weights are not reordered: products take %.2f of the time without it", share)
    return share >= MARGIN


@cache
def _share_of_time(shapes: tuple[torch.Size, ...], dtype: torch.dtype) -> float:
    """How long products with ordinary weights of these shapes (out, in) take, compared with
    reordered ones; the quickest of several turns counts."""
    weights = [torch.full(shape, 0.01, dtype=dtype) for shape in shapes]
    sides = [[kind(weight, None) for weight in weights] for kind in (frozen_linear, PackedLinear)]
    widths = {width for _, width in shapes}
    seconds = torch.zeros(2)
    for rows in (1, ROWS_TO_OPTIMISE_FOR):
        inputs = {width: torch.ones(rows, width, dtype=dtype) for width in widths}
        turns = [[_seconds(linears, inputs) for linears in sides] for _ in range(TURNS)]
        seconds += torch.tensor(turns).amin(0)
    return float(seconds[0] / seconds[1])


def _seconds(linears: list[nn.Module], inputs: dict[int, torch.Tensor]) -> float:
    """What one product with each linear takes; inputs: by their width."""
    begun = perf_counter()
    for linear in linears:
        linear(inputs[linear.in_features])
    return perf_counter() - begun


class FusedLinear(nn.Module):
    """One of several frozen linears over the same input, which are called in their order: the first
    computes all, and the others take their part of it."""

    def __init__(self, product: "_Product", index: int):
        super().__init__()
        self.product, self.index = product, index
        self.out_features, self.in_features = self.weight.shape

    @property
    def weight(self) -> torch.Tensor:
        """The (out, in) matrix, a part of the large one."""
        return self.product.linear.weight.split(self.product.sizes)[self.index]

    @property
    def bias(self) -> torch.Tensor | None:
        bias = self.product.linear.bias
        return None if bias is None else bias.split(self.product.sizes)[self.index]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        product = self.product
        if not self.index:
            found = product.linear(rows).split(product.sizes, -1)
            product.later.clear()
            product.later.extend(found[::-1])
        return product.later.pop()


class _Product(nn.Module):
    """Several linears in one; later: what was computed and is still to be taken."""

    def __init__(self, linears: list[nn.Linear]):
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        self.later: list[torch.Tensor] = []
        biases = [linear.bias for linear in linears]
        bias = None if biases[0] is None else torch.cat(biases)
        self.linear = frozen_linear(torch.cat([linear.weight for linear in linears]), bias)


def fuse_linears(layers: Iterable[nn.Module], groups: Iterable[tuple[str, ...]]) -> None:
    """Let the linears of each group, names inside a layer, be one product in all `layers`. What is
    no ordinary frozen linear stays as it is."""
    for layer in layers:
        modules = dict(layer.named_modules())
        for names in groups:
            linears = [modules.get(name) for name in names]
            if all(type(own) is nn.Linear and not own.weight.requires_grad for own in linears) and (
                len({own.bias is None for own in linears}) == 1
            ):
                product = _Product(linears)
                for index, name in enumerate(names):
                    layer.set_submodule(name, FusedLinear(product, index))


def is_fused(module: nn.Module) -> bool:
    """Whether linears below `module` are parts of larger ones."""
    return any(isinstance(child, FusedLinear) for child in module.modules())


def unpack_linears(module: nn.Module) -> None:
    """Replace every packed or fused linear below `module` by an ordinary one, bit for bit the
    same."""
    for name, child in list(module.named_modules()):
        if name and isinstance(child, PackedLinear | FusedLinear):
            module.set_submodule(name, frozen_linear(child.weight, child.bias))


def is_packed(module: nn.Module) -> bool:
    """Whether any linear below `module` has a reordered weight."""
    return any(isinstance(child, PackedLinear) for child in module.modules())


def matrix_of(linear: nn.Module) -> torch.Tensor:
    """The (out, in) matrix of a linear layer, also of GPT-2's Conv1D."""
    return linear.weight.t() if hasattr(linear, "nx") else linear.weight


def frozen_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """A linear layer with these numbers, (out, in) and (out,)."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear
