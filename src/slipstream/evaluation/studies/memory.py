"""Peak memory of a computation, counted tensor by tensor, on any device."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Within, `peak` is the most bytes that tensors made here held at one time.

    Every operator's outputs count from when they are made until their storage is freed, those of
    the backward pass and of saved activations included; what was there before does not, nor do
    buffers that a kernel frees before it returns.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor.untyped_storage(), new=False)
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor.untyped_storage(), new=True)
        return result

    def _meet(self, storage: torch.UntypedStorage, new: bool) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes() if new else 0
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
