"""Steps of decoding as compiled layers and CUDA graphs: no Python between their kernels.

All steps run the same layers on as many rows; only contents differ. `CompiledLayers` compiles such
a span once (torch.compile; one row and several are two cases) and, on a CUDA device, captures it as
a graph for each number of rows and slots. Keys and values stay in buffers that never move. The
eager layers are the reference; prompts, pruned rows and training always run eagerly.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from slipstream.core.cache import StepCache
from slipstream.core.errors import InputError
from slipstream.targets.packed import is_packed
from slipstream.targets.quantized import is_quantized
from slipstream.targets.rows import Rows
from slipstream.targets.target import Target

MODES = ("auto", "off", "reduce-overhead")
# Slots are counted in multiples of this: a graph serves so many committed lengths.
GRANULARITY = 256
# How many spans may be compiled: of all targets, with one row or several.
COMPILED = 256
# Caches have a multiple of so many slots, so that most prompts find one that is there.
CAPACITY = 1024


def compile_target(target: Target, mode: str) -> Target:
    """Let the steps of decoding with `target` run compiled, as `engine.compile` says.

    mode: 'off'; 'reduce-overhead'; 'auto', which is 'reduce-overhead' on a CUDA device for a whole
    target of ordinary weights, and 'off' elsewhere: on a CPU, reordered weights gain more than
    compilation, and the two exclude each other. Returns `target`; raises `InputError` for what
    cannot be compiled.
    """
    if mode not in MODES:
        raise InputError(f"engine.compile: must be one of {', '.join(MODES)}")
    obstacle = _obstacle(target)
    if mode == "reduce-overhead" and obstacle:
        raise InputError(f"engine.compile: {obstacle}, or engine.compile=off")
    wanted = mode == "reduce-overhead" or (mode == "auto" and target.device.type == "cuda")
    target.compiled = CompiledLayers(target) if wanted and not obstacle else None
    return target


def compile_like(other: Target, target: Target) -> None:
    """Let steps with `other`, which takes part in decoding with `target`, run compiled if those
    with `target` do and `other` can."""
    if other.compiled is None and target.compiled is not None and not _obstacle(other):
        other.compiled = CompiledLayers(other)


@contextmanager
def uncompiled(target: Target) -> Iterator[None]:
    """Steps run eagerly: graphs know the arithmetic alone that they were captured with."""
    compiled, target.compiled = target.compiled, None
    try:
        yield
    finally:
        target.compiled = compiled


def _obstacle(target: Target) -> str | None:
    """Why a target cannot be compiled, and what to do about it."""
    if is_packed(target.model):
        return "weights reordered for a CPU cannot be compiled; set target.packed=false"
    if is_quantized(target.model):
        return "quantised weights are not compiled; set target.quantization=null"
    if target.num_parallel > 1 or hasattr(target.model, "hf_device_map"):
        return "a target spread over devices is not compiled; load it whole"
    # Of all layers, or of each kind of layers.
    rope = getattr(target.model.config, "rope_parameters", None) or {}
    kinds = [each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)]
    if "dynamic" in kinds or "longrope" in kinds:
        return (
            "rotary positions that depend on the length are not compiled; set engine.compile=auto"
        )
    return None


class CompiledLayers:
    """Runs spans of a target's layers over rows with a mask; those that come again in every step
    are compiled and, where `replays` says so, captured as graphs."""

    def __init__(self, target: Target):
        # Spans of all targets share one function, which is compiled for each of them.
        torch._dynamo.config.recompile_limit = max(COMPILED, torch._dynamo.config.recompile_limit)
        self.target = target
        self.replays = target.device.type == "cuda"
        self._compiled = torch.compile(self._span, dynamic=True, fullgraph=True)
        self._graphs: dict[tuple, _Graph] = {}
        self._cache: StepCache | None = None

    def new_cache(self, allocate: Callable[..., StepCache], capacity: int, batch: int) -> StepCache:
        """An empty cache, over the buffers of the last one if they have the size; one decoding may
        use them at a time."""
        capacity = -(-(capacity + GRANULARITY - 1) // CAPACITY) * CAPACITY
        kept = self._cache
        if kept is None or (kept.capacity, len(kept.lengths)) != (capacity, batch):
            self._graphs.clear()
            self._cache = None
            self._cache = allocate(capacity, batch, GRANULARITY)
        return self._cache.emptied()

    def __call__(self, modules: Sequence[nn.Module], rows: Rows, cache: StepCache) -> torch.Tensor:
        """(B, R, D) hidden states after the layers `modules`, whose keys and values are staged
        where the mask has its last R columns."""
        inputs = rows.hidden, rows.positions, rows.mask
        modules, layers = list(modules), cache.layers
        cache.check_room(rows.mask.shape[-1] - cache.slots)
        if not rows.repeats:
            return self._span(modules, layers, *inputs)
        # Hooks of adapters belong to the rows, not to the layers: they are captured, not compiled.
        span = self._compiled if rows.acting is None else self._span
        if not self.replays:
            return span(modules, layers, *inputs)
        shapes = tuple(given.shape for given in inputs)
        place = layers[0][0].data_ptr(), layers[0][0].shape
        key = id(modules[0]), id(modules[-1]), id(rows.acting), rows.num_nodes, shapes, place
        if key not in self._graphs:
            kept = modules, layers, rows.acting
            self._graphs[key] = _Graph(lambda *given: span(modules, layers, *given), inputs, kept)
        return self._graphs[key](inputs)

    def replayed(self, run: Callable, settings: tuple, *inputs: torch.Tensor):
        """`run(*settings, *inputs)`, tensors or tuples of them that depend on nothing else."""
        if not self.replays:
            return run(*settings, *inputs)
        key = run, settings, tuple(given.shape for given in inputs)
        if key not in self._graphs:
            self._graphs[key] = _Graph(partial(run, *settings), inputs, key)
        return self._graphs[key](inputs)

    def _span(self, modules, layers, hidden, positions, mask) -> torch.Tensor:
        rows = Rows(hidden, positions, mask)
        slots = _Slots(layers, mask.shape[-1] - hidden.shape[1])
        return self.target.run_each(modules, rows, slots).hidden


class _Slots:
    """What compiled layers see of a cache: where this forward's rows are staged."""

    is_compileable = True

    def __init__(self, layers: list[tuple[torch.Tensor, torch.Tensor]], start: int):
        self.layers, self.start = layers, start

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_, **__
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.layers[layer_idx]
        stop = self.start + key.shape[-2]
        keys[..., self.start : stop, :] = key
        values[..., self.start : stop, :] = value
        return keys[..., :stop, :], values[..., :stop, :]


class _Graph:
    """A CUDA graph of `run` for inputs of fixed shapes; kept: what must live as long as it.

    Graphs share their memory: one is replayed at a time, and its output is copied.
    """

    _pool = None

    def __init__(self, run: Callable[..., torch.Tensor], inputs: Sequence, kept: object):
        self._kept = kept
        self._inputs = [given.clone() for given in inputs]
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # compilation, autotuning and workspaces, before capture
            for _ in range(2):
                run(*self._inputs)
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        if _Graph._pool is None:
            _Graph._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(self._graph, pool=_Graph._pool):
            self._output = run(*self._inputs)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        torch._foreach_copy_(self._inputs, list(inputs))
        self._graph.replay()
        return tree_map_only(torch.Tensor, torch.clone, self._output)
