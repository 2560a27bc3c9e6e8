"""Between host and device without needless waiting: a decoding step waits for its device once.

On the CPU these are what `torch.as_tensor` and `Tensor.cpu` are.
"""

from collections.abc import Callable, Sequence

import torch


def on_device(values: Sequence | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of `values` on `device`; a CUDA device copies it when its turn comes."""
    tensor = torch.as_tensor(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def right_padded(
    texts: Sequence[Sequence[int]], device: torch.device, width: int = 0, value: int = 0
) -> torch.Tensor:
    """(B, T) tokens of texts, right-padded with `value` to the longest, or to `width` if larger.

    >>> right_padded([[1, 2], []], torch.device("cpu"), width=3).tolist()
    [[1, 2, 0], [0, 0, 0]]
    """
    width = max(width, *map(len, texts))
    return on_device([[*text, *[value] * (width - len(text))] for text in texts], device)


def sent(*tensors: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    """Start copying `tensors` to the CPU. Returns a function that gives the copies after one wait
    for the work queued on their devices so far, and not for work that is queued later."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def arrived() -> list[torch.Tensor]:
        for event in events:
            event.synchronize()
        return copies

    return arrived
