"""Steps of decoding as compiled layers and CUDA graphs: no Python between their kernels.

All steps run the same layers on as many rows; only contents differ. `CompiledLayers` compiles one
layer for all (torch.compile; one row and several are two cases). On a CUDA device whole parts of a
step (`replayed`: the verification, the draft), and spans of layers that are part of none, are
graphs for each number of rows, of slots and of sequences (1, 2, 4 or a multiple of 8). Keys and
values stay in buffers that move only in order to grow. Short prompts are padded to few lengths and
run as steps do; long ones, rows that are pruned without a cap on a CPU, and training run eagerly:
the eager layers are the reference.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Literal

import torch
from torch import nn

from slipstream.core.cache import StepCache
from slipstream.core.device import has_room_for
from slipstream.core.errors import InputError
from slipstream.core.settings import checked
from slipstream.targets.families import rope_kinds
from slipstream.targets.graphs import Graphs, first, padded, unpadded
from slipstream.targets.packed import is_packed
from slipstream.targets.quantized import is_quantized
from slipstream.targets.rows import Rows
from slipstream.targets.target import Target

MODES = ("auto", "off", "reduce-overhead")
# Slots are counted in multiples of this: a graph serves so many committed lengths.
GRANULARITY = 256
REPLAYING = ("cuda",)
# How many layers may be compiled: of all targets and kinds, with one row or several.
COMPILED = 256
# Caches have a multiple of so many slots, so that most prompts find one that is there.
CAPACITY = 1024
# Prompts are padded to multiples of so many rows, where a batch has at most so many: of more the
# device is busy for longer than the host needs to launch what they run.
PROMPT, PROMPT_ROWS = 64, 512


@checked
def compile_target(target: Target, mode: Literal[MODES]) -> Target:
    """Let the steps of decoding with `target` run compiled, as `engine.compile` says.

    mode: 'off'; 'reduce-overhead'; 'auto', which is 'reduce-overhead' on a CUDA device for a whole
    target of ordinary weights, and 'off' elsewhere: on a CPU, reordered weights gain more than
    compilation, and the two exclude each other. Returns `target`; raises `InputError` for what
    cannot be compiled.
    """
    obstacle = _obstacle(target)
    if mode == "reduce-overhead" and obstacle:
        raise InputError(f"engine.compile: {obstacle}, or engine.compile=off")
    wanted = mode == "reduce-overhead" or (mode == "auto" and target.device.type == "cuda")
    target.compiled = CompiledLayers(target) if wanted and not obstacle else None
    target.compile_mode = mode
    return target


def compile_like(other: Target, target: Target) -> None:
    """Let steps with `other`, which takes part in decoding with `target`, run compiled if those
    with `target` do and `other` can."""
    if other.compiled is None and target.compiled is not None and not _obstacle(other):
        other.compiled = CompiledLayers(other)


def _obstacle(target: Target) -> str | None:
    """Why a target cannot be compiled, and what to do about it."""
    if is_packed(target.model):
        return "weights reordered for a CPU cannot be compiled; set target.packed=false"
    if is_quantized(target.model):
        return "quantised weights are not compiled; set target.quantization=null"
    if target.num_parallel > 1 or hasattr(target.model, "hf_device_map"):
        return "a target spread over devices is not compiled; load it whole"
    if {"dynamic", "longrope"} & rope_kinds(target.model.config):
        return (
            "rotary positions that depend on the length are not compiled; set engine.compile=auto"
        )
    return None


class CompiledLayers:
    """Runs spans of a target's layers over rows with a mask; the layers of those that come again in
    every step are compiled and, on devices with graphs, captured with what is around them."""

    def __init__(self, target: Target):
        # Layers of all targets share one function, which is compiled for each kind of them.
        torch._dynamo.config.recompile_limit = max(COMPILED, torch._dynamo.config.recompile_limit)
        self.target = target
        self._compiled = torch.compile(_run_layer, dynamic=True, fullgraph=True)
        self.graphs, self._lock = Graphs(target.device), Lock()
        self._buffers: StepCache | None = None
        self._user: Callable[[], StepCache | None] = lambda: None

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of a target is not compiled: `compile_target` does that."""

    def new_cache(self, capacity: int, batch: int, instead_of: StepCache | None) -> StepCache:
        """An empty cache over the buffers that graphs were captured for. They serve one cache at a
        time; another, of a thread that decodes meanwhile, too, gets buffers of its own, without
        graphs. Both have room for the padding of a prompt."""
        capacity, allocate = capacity + spare(), self.target.allocate
        with self._lock:
            if self._user() not in (None, instead_of):
                return allocate(capacity, batch, GRANULARITY, spare())
            kept = self._buffers
            if kept is None or capacity > kept.capacity or batch > kept.batch_size:
                freed = kept.nbytes if kept is not None and instead_of is None else 0
                sizes = self._sizes(capacity, batch, kept, freed)
                if self._user() is None:  # else the cache that goes on holds them, and keeps them
                    self._buffers = kept = None
                self.graphs.clear()
                self._buffers = allocate(*sizes, GRANULARITY, spare())
            elif self._user() is None:  # 0 times what an overflow left there would be no number
                kept.clear(padded(batch))
            cache = self._buffers.emptied(batch)
            self._user = weakref.ref(cache)
            return cache

    def _sizes(
        self, capacity: int, batch: int, kept: StepCache | None, freed: int
    ) -> tuple[int, int]:
        """Slots and sequences of new buffers: they shrink in neither, unless both together (the
        longest text may not have been of the largest batch) take more than half of the memory that
        is free, beside what is `freed`."""
        needed = _rounded(capacity), padded(batch)
        if kept is None:
            return needed
        slots, sequences = map(max, needed, (kept.capacity, kept.batch_size))
        size = kept.nbytes // (kept.capacity * kept.batch_size) * slots * sequences
        fits = has_room_for(size - freed, self.graphs.device, 1 / 2)
        return (slots, sequences) if fits else needed

    def deserted(self, first: StepCache, second: StepCache | None = None) -> bool:
        """Whether the buffers that graphs were captured for are not those of `first`, and nobody's
        but of `second`: so it is once others came, or went, while a long prompt was read in parts.
        """
        apart = self._buffers is not None and first.layers is not self._buffers.layers
        return apart and self._user() in (None, second)

    def prompt_width(self, length: int, cache: StepCache) -> int:
        """How many rows prompts of up to `length` tokens have in an empty cache, so that graphs
        serve many of them; 0 where it does not matter."""
        width = -(-length // PROMPT) * PROMPT
        return width if padded(len(cache.lengths)) * width <= PROMPT_ROWS else 0

    def __call__(self, modules: Sequence[nn.Module], rows: Rows, cache: StepCache) -> Rows:
        """Run `modules`, whose keys and values are staged where the mask has its last R columns,
        and `rows.readout`; replaces `rows.hidden` and `rows.outcome`."""
        inputs, modules = (rows.hidden, rows.positions, rows.mask), tuple(modules)
        cache.check_room(rows.mask.shape[-1] - cache.slots)
        run = partial(self._span, modules, rows, cache)
        if rows.repeats and self._captures(cache):
            key = modules[0], len(modules), rows.acting, rows.readout, rows.num_nodes
            run = self.graphs.of(key, run, inputs)
        rows.hidden, rows.outcome = run(*inputs)
        return rows

    def _span(self, modules, like: Rows, cache: StepCache, hidden, positions, mask) -> tuple:
        """The states after `modules`, and what `like.readout` makes of them."""
        rows = Rows(hidden, positions, mask, like.num_stream_rows, readout=like.readout)
        # Hooks of adapters belong to the rows, not to the layers: they are captured, not compiled.
        run = self._compiled if like.repeats and like.acting is None else _run_layer
        family = self.target.family

        def run_layer(module, hidden, *others):
            both = cache.layers[family.index_of(module)]
            keys, values = (first(own, len(hidden)) for own in both)
            return run(family, module, hidden, *others[:-1], keys, values)

        self.target.run_each(modules, rows, cache, run_layer)
        rows.read_out()
        return rows.hidden, rows.outcome

    def replayed(self, run: Callable, key: tuple, inputs: Sequence, cache: StepCache | None):
        """`run(*inputs)`, as a graph where graphs are captured. `run` may depend on nothing but
        its inputs, tensors with the batch first, and what `key` contains."""
        if self._captures(cache):
            run = self.graphs.of(key, run, inputs)
        return run(*inputs)

    def _captures(self, cache: StepCache | None) -> bool:
        """Whether what runs here is a graph: over the buffers that all caches share, and not as
        part of another graph."""
        ours = cache is None or (self._buffers is not None and cache.layers is self._buffers.layers)
        return ours and not self.graphs.capturing and self.graphs.device.type in REPLAYING


def _run_layer(family, module, hidden, mask, positions, rotary, keys, values) -> torch.Tensor:
    """One layer over (B, R, D) rows and the keys and values of all slots: what is compiled. It does
    not look at which layer it is, so that all layers of a kind share what was compiled for one."""
    place = _Place(keys, values, mask.shape[-1] - hidden.shape[1])
    return family.run_layer(module, hidden, mask, positions, rotary, place)


class _Place:
    """What one layer sees of a cache: where this forward's rows are staged."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, start: int):
        self.keys, self.values, self.start = keys, values, start

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_, **__
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stop = self.start + key.shape[-2]
        self.keys[..., self.start : stop, :] = key
        self.values[..., self.start : stop, :] = value
        return self.keys[..., :stop, :], self.values[..., :stop, :]


def spare() -> int:
    """Slots beyond those that texts need: rows begin at a multiple of some, prompts are padded."""
    return GRANULARITY + PROMPT


def batch_within(slots: float, length: int, target: Target) -> int:
    """How many texts of up to `length` tokens, at least one, have room in so many slots of a cache,
    as graphs want them where there are any."""
    if target.device.type not in REPLAYING or _obstacle(target):
        return max(1, int(slots / length))
    return unpadded(max(1, int(slots / _rounded(length + spare()))))


def _rounded(capacity: int) -> int:
    return -(-capacity // CAPACITY) * CAPACITY
