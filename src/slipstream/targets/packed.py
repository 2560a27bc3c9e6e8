"""CPU linears whose weights oneDNN has reordered once for small batches of rows.

With ordinary linears a forward of eight rows costs about twice a forward of one; with reordered
weights it costs about the same, which is what makes verifying several tokens at once pay on a CPU.
The plain linears are the reference (results differ by rounding, about 2e-6 in float32) and the
fallback where oneDNN has no such operator.
"""

import torch
from torch import nn

ROWS_TO_OPTIMISE_FOR = 8


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
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")


def packing_available(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this processor can reorder weights of `dtype`."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def pack_linears(module: nn.Module) -> int:
    """Replace every linear below `module` (also GPT-2's Conv1D) by a packed one; returns how many.

    The replaced weights are dropped, so the model is for decoding only from here on. Linears of
    other libraries (quantised ones) and weights of other types are left alone.
    """
    from transformers.pytorch_utils import Conv1D

    found = [
        (name, child)
        for name, child in module.named_modules()
        if name and type(child) in (nn.Linear, Conv1D) and packing_available(child.weight.dtype)
    ]
    for name, child in found:
        module.set_submodule(name, PackedLinear(matrix_of(child), child.bias))
    return len(found)


def unpack_linears(module: nn.Module) -> None:
    """Replace every packed linear below `module` by an ordinary one, bit for bit the same."""
    for name, child in list(module.named_modules()):
        if name and isinstance(child, PackedLinear):
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
