"""Between host and device without needless waiting: a decoding step waits for its device once.

On the CPU these are what `torch.tensor` and `Tensor.cpu` are.
"""

from collections.abc import Sequence

import torch


def on_device(values: Sequence | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of `values` on `device`; a CUDA device copies it when its turn comes."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def on_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """All `tensors` on the CPU, after a single wait for their device."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.current_stream().synchronize()
    return copies
