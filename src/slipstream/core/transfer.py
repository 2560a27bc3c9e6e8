"""Between host and device without needless waiting: a decoding step waits for its device once.

On the CPU these are what `torch.as_tensor` and `Tensor.cpu` are.
"""

from collections.abc import Sequence

import torch


def on_device(values: Sequence | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of `values` on `device`; a CUDA device copies it when its turn comes."""
    tensor = torch.as_tensor(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def on_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """All `tensors` on the CPU, after a single wait for their device."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies
