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

    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            weight = getattr(child, "weight", None)
            if type(child) not in (nn.Linear, Conv1D) or not packing_available(weight.dtype):
                continue
            matrix = weight.t() if type(child) is Conv1D else weight
            setattr(parent, name, PackedLinear(matrix, child.bias))
            count += 1
    return count


def is_packed(module: nn.Module) -> bool:
    """Whether any linear below `module` has a reordered weight."""
    return any(isinstance(child, PackedLinear) for child in module.modules())


def unpack_linears(module: nn.Module) -> None:
    """Replace every packed linear below `module` by an ordinary one, bit for bit the same."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                linear = nn.Linear(child.in_features, child.out_features, child.bias is not None)
                linear.weight = nn.Parameter(child.weight, requires_grad=False)
                if child.bias is not None:
                    linear.bias = nn.Parameter(child.bias, requires_grad=False)
                setattr(parent, name, linear)
