"""How much memory a training step takes: counted while it runs, or estimated before it does.

The estimate is no table of constants. The very step that will be trained runs once on tensors
without content (torch's fake tensors, which have shapes, dtypes and storages of a size). So it
follows every option of a speculator, needs a model's config alone, and costs seconds.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.data.batches import Batch
from slipstream.speculators import losses
from slipstream.targets.target import Target

GIB = 2**30
Step = Callable[[Batch], torch.Tensor]
"""The loss of a batch."""


class PeakMemory(TorchDispatchMode):
    """Within, `peak` is the most bytes that tensors made here held at one time, on any device.

    Every operator's outputs count from when they are made until their storage is freed, those of
    the backward pass and of saved activations included; what was there before does not, nor do
    buffers that a kernel frees before it returns, nor what an allocator holds back.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "prim":  # asks a fake tensor for its device
            return function(*args, **(kwargs or {}))
        if function.overloadpacket in _INDEXING:
            args = args[0], _as_numbers(args[1]), *args[2:]
        self._meet((args, kwargs), new=False)
        result = function(*args, **(kwargs or {}))
        self._meet(result, new=True)
        return result

    def _meet(self, tensors, new: bool) -> None:
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes() if new else 0
            if key not in self._known:
                self._known.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


_INDEXING = {
    getattr(torch.ops.aten, name)
    for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
}


def _as_numbers(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Masks as the indices that they stand for: how many, a tensor without content cannot know of
    the mask that it is indexed with."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        mask = index is not None and index.dtype == torch.bool
        found += index.nonzero(as_tuple=True) if mask else [index]
    return found


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak of training. weights: of the model and all that is trained; moments:
    AdamW's two for every trained tensor; step: activations, logits and gradients, or validation's
    part if that is more."""

    weights: int
    moments: int
    step: int

    @property
    def total(self) -> int:
        return self.weights + self.moments + self.step

    def __str__(self) -> str:
        parts = (f"{name} {size / GIB:.2f}" for name, size in vars(self).items())
        return f"{self.total / GIB:.2f} GiB ({', '.join(parts)})"


def empty_target(config, dtype: torch.dtype) -> Target:
    """A target of this transformers config, without weights: its tensors have no content."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return Target(model.eval().requires_grad_(False))


def step_bytes(step_of: Callable[[], Step], batch: Batch, mixed: bool, device: str = "cpu") -> int:
    """The peak of a step's forward and backward pass.

    step_of: makes the step, of parts without content. mixed: whether it runs in bfloat16 over
    float32 parameters; device: which one, for that many bytes of logits at a time.
    """
    # PyTorch cannot move modules without content; PEFT asks for it, to where they are already.
    unmoved = patch.object(nn.Module, "to", lambda module, *_, **__: module)
    with FakeTensorMode(allow_non_fake_inputs=True), unmoved:
        step = step_of()
    usual = losses.SLICE_BYTES
    slices = patch.dict(usual, cpu=usual.get(device, usual["cpu"]))
    with slices, PeakMemory() as memory:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = step(batch)
        loss.backward()
    return memory.peak


def largest_batch(batches, processes: int) -> Batch:
    """What the first of several processes gets of the batch of `TokenBatches` whose streams, padded
    to the longest answer, are most."""
    order = batches.in_order(torch.Generator().manual_seed(0), processes)
    found = (batches.batch(rows[::processes]) for rows in order)
    return max(found, key=lambda batch: (batch.supervised.sum(1).max() * len(batch.ids)).item())
