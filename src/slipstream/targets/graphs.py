"""CUDA graphs of parts of a step: captured once for each key and shape, replayed from then on.

What is captured is a function of tensors whose first dimension is the batch. A graph serves 1, 2, 4
or a multiple of 8 sequences. This room knows neither layers nor caches.
"""

import copy
import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import nn

from slipstream.core.errors import out_of_memory
from slipstream.core.trees import Trees
from slipstream.targets.rows import Rows

log = logging.getLogger(__name__)

MOST = 2048
"""How many graphs are kept, those that were used last: a long text goes through many numbers of
slots, a server through batches and budgets, too."""


class Graphs:
    """Those of one target. `kept`: by key and shapes, the last one used last; capturing: whether
    one is being captured."""

    def __init__(self, device: torch.device):
        self.device, self.capturing = device, False
        self.kept: dict[tuple, _Graph] = {}
        self._results: dict[tuple, torch.Tensor] = {}
        self._short: set[tuple] = set()  # what memory was short for
        own = weakref.ref(self)
        self._gone = lambda gone: own() and own()._forget(gone)

    def of(self, key: tuple, run: Callable, inputs: Sequence[torch.Tensor]) -> Callable:
        """That of `run`, which `key` names, for inputs of these shapes; `run` itself where memory
        was short for it. With a layer, a visitor or a method's owner that it names, a graph goes.
        """
        batch, shapes = padded(len(inputs[0])), tuple(given.shape[1:] for given in inputs)
        key = *self._weak(key), batch, shapes
        if key in self._short:
            return run
        graph = self.kept.pop(key, None)
        if graph is None:
            if len(self.kept) >= MOST:
                del self.kept[next(iter(self.kept))]
            self.capturing = True
            try:
                graph = _Graph(run, inputs, batch, self._pool_of, self.device, self._results)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                log.warning("no memory for one more CUDA graph: all %d go", len(self.kept))
                short = {*self._short, key}
                self.clear()
                self._short = short
                return run
            finally:
                self.capturing = False
        self.kept[key] = graph
        return graph

    def clear(self) -> None:
        """All go, and what memory was short for may be captured again."""
        self.kept.clear()
        self._results.clear()
        self._short.clear()

    def _pool_of(self) -> object:
        if not self.kept:  # the pool of graphs that are gone cannot be opened again
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _weak(self, part: object) -> object:
        """`part` of a key, with weak references to what a drafter holds."""
        if type(part) is tuple:
            return tuple(map(self._weak, part))
        if inspect.ismethod(part):
            return weakref.WeakMethod(part, self._gone)
        visitor = hasattr(part, "replays") and not isinstance(part, type)
        held = visitor or isinstance(part, nn.Module) or inspect.isfunction(part)
        return weakref.ref(part, self._gone) if held else part

    def _forget(self, gone: weakref.ref) -> None:
        for key in list(self.kept):  # another thread may be at work on them
            if _holds(key, gone):
                self.kept.pop(key, None)


def _holds(key: object, gone: weakref.ref) -> bool:
    return key is gone or (type(key) is tuple and any(_holds(part, gone) for part in key))


def padded(batch: int) -> int:
    """How many sequences a graph for `batch` of them has: 1, 2, 4, or a multiple of 8."""
    return 1 << (batch - 1).bit_length() if batch <= 8 else -(-batch // 8) * 8


def unpadded(most: int) -> int:
    """The largest batch of up to `most` sequences that a graph serves without padding.

    >>> [unpadded(most) for most in (1, 3, 7, 8, 30)], padded(5)
    ([1, 2, 4, 8, 24], 8)
    """
    return most // 8 * 8 if most >= 8 else 1 << (most.bit_length() - 1)


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Where all graphs of a device are captured: what libraries keep for a stream they keep once,
    and not in the pool of graphs that may go."""
    return torch.cuda.Stream(device)


class _Graph:
    """A CUDA graph of `run` for inputs of fixed shapes, with `batch` sequences.

    Given fewer, the others keep earlier inputs, and what they stage belongs to nothing. Graphs of a
    pool share their memory, and those with results of the same kind `results`: one is replayed at a
    time, and its results are copied.
    """

    def __init__(
        self, run: Callable, inputs: Sequence, batch: int, pool: Callable, device, results: dict
    ):
        # The others start as copies of the first sequence: rows that attend to nothing would be
        # NaN, and an index out of range would stop the device.
        self._inputs = [given[:1].repeat(batch, *[1] * (given.ndim - 1)) for given in inputs]
        self._copy_in(inputs)
        with torch.cuda.device(device):
            before, beside = torch.cuda.current_stream(), _stream(device)
            beside.wait_stream(before)
            try:
                with torch.cuda.stream(beside):  # compilation and autotuning come before
                    for _ in range(2):
                        found = run(*self._inputs)
            finally:
                before.wait_stream(beside)
            self._graph, place = torch.cuda.CUDAGraph(), _places(found, results)
            # What other threads do meanwhile (a server's, a loader's) is no part of it.
            capture = dict(pool=pool(), stream=beside, capture_error_mode="thread_local")
            try:
                with torch.cuda.graph(self._graph, **capture):
                    self._found = _mapped(run(*self._inputs), place)
            finally:  # a capture that fails leaves the thread on the stream beside
                torch.cuda.set_stream(before)

    def _copy_in(self, inputs: Sequence[torch.Tensor]) -> None:
        own = [first(each, len(inputs[0])) for each in self._inputs]
        torch._foreach_copy_(own, list(inputs))

    def __call__(self, *inputs: torch.Tensor) -> object:
        self._copy_in(inputs)
        self._graph.replay()
        return _mapped(self._found, lambda own: first(own, len(inputs[0])).clone())


def _places(found: object, results: dict) -> Callable[[torch.Tensor], torch.Tensor]:
    """Copies one tensor after the other of what is built as `found` is into those of `results`."""
    kinds, places = Counter(), []

    def place(own: torch.Tensor) -> torch.Tensor:
        kind = own.shape, own.dtype, own.device
        kinds[kind] += 1
        if (*kind, kinds[kind]) not in results:
            results[*kind, kinds[kind]] = torch.empty_like(own)
        places.append(results[*kind, kinds[kind]])
        return own

    _mapped(found, place)
    following = iter(places)
    return lambda own: next(following).copy_(own)


def _mapped(found: object, of: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """`found`, with `of` each tensor in its place."""
    if isinstance(found, torch.Tensor):
        return of(found)
    if isinstance(found, tuple):
        return tuple(_mapped(each, of) for each in found)
    if isinstance(found, dict):
        return {name: _mapped(each, of) for name, each in found.items()}
    if isinstance(found, (Rows, Trees)):
        own = copy.copy(found)
        vars(own).update(_mapped(vars(found), of))
        return own
    return found


def first(sequences: torch.Tensor, count: int) -> torch.Tensor:
    """The first so many of a batch; without an operation where that is all."""
    return sequences if len(sequences) == count else sequences[:count]
