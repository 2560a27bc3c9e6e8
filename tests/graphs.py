"""A stand-in for CUDA graphs, streams and memory pools on the CPU, which counts and is as strict.

A capture records every operation with the tensors it had, a replay runs them again over the same
memory: what the host knew at the capture is frozen, as on a device.
"""

from contextlib import contextmanager
from random import Random
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from slipstream.targets import compiled, graphs


class Recorder(TorchDispatchMode):
    """Records what is computed; to read a number off a tensor is an error, as in a capture."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        assert "_local_scalar_dense" not in str(function), "a capture cannot wait for the device"
        found = function(*arguments, **(options or {}))
        self.calls.append((function, arguments, options or {}, found))
        return found


class Graph:
    """What `torch.cuda.CUDAGraph` is."""

    def __init__(self):
        self.calls, self.replays = [], 0

    def replay(self) -> None:
        self.replays += 1
        with _disable_current_modes():  # one launch, whatever it runs
            for function, arguments, options, found in self.calls:
                now = function(*arguments, **options)
                for own, new in zip(tree_leaves(found), tree_leaves(now), strict=True):
                    if isinstance(own, torch.Tensor) and own.data_ptr() != new.data_ptr():
                        own.copy_(new)


class Stream:
    def __init__(self, device):
        self.device, self.busy = device, 0

    def wait_stream(self, other) -> None:
        pass


class Cuda:
    """What is used of `torch.cuda`. captures: how many there were; pools: their live graphs, by the
    pool's handle; places: (device, stream, pool) of each capture."""

    def __init__(self):
        self.captures, self.pools, self.places = 0, {}, []
        self.current, self.within = None, None

    def graph_pool_handle(self) -> object:
        return object()

    @contextmanager
    def device(self, device):
        self.within, before = device, self.within
        yield
        self.within = before

    @contextmanager
    def stream(self, stream):
        assert stream.device == self.within
        self.current, before = stream, self.current
        stream.busy += 1
        yield
        self.current = before

    def current_stream(self) -> Stream:
        return self.current or Stream(self.within)

    @contextmanager
    def graph(self, graph: Graph, pool: object, stream: Stream, capture_error_mode: str):
        """As the allocator: a pool lives as long as a graph of it, and is not opened again. After
        a capture that fails the thread stays on the stream."""
        assert stream.device == self.within and stream.busy, "no warm-up on the capture's stream"
        known = self.pools.get(pool)
        assert known is None or len(known), "use_count > 0 INTERNAL ASSERT"
        self.pools.setdefault(pool, WeakSet()).add(graph)
        self.captures += 1
        self.places.append((self.within, stream, pool))
        before, self.current = self.current, stream
        with Recorder() as recorder:
            yield
        graph.calls, self.current = recorder.calls, before

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @property
    def living(self) -> int:
        """Pools with live graphs."""
        return sum(len(graphs) > 0 for graphs in self.pools.values())


def stand_in(monkeypatch) -> Cuda:
    """Put a `Cuda` in the place of what `compiled` uses of `torch.cuda`; steps of few slots at a
    time, and nothing compiled (for speed)."""
    cuda = Cuda()
    for name in "graph_pool_handle device stream current_stream set_stream graph".split():
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(compiled, "GRANULARITY", 8)
    monkeypatch.setattr(compiled, "CAPACITY", 32)
    monkeypatch.setattr(compiled, "PROMPT", 4)
    monkeypatch.setattr(compiled, "PROMPT_ROWS", 16)
    graphs._stream.cache_clear()
    return cuda


def come_and_go(decoder, prompts: list[list[int]], seed: int) -> list[list[int]]:
    """Answers of prompts that join by ones and twos, up to five together."""
    random = Random(seed)
    requests = [decoder.request(ids, place) for place, ids in enumerate(prompts)]
    waiting = list(requests)
    while waiting or decoder.running:
        most = 5 - len(decoder.running.requests) if decoder.running else 2
        if waiting and most > 0 and (decoder.running is None or random.random() < 0.5):
            count = random.randint(1, min(2, most))
            decoder.start(waiting[:count])
            waiting = waiting[count:]
        elif decoder.running:
            decoder.step()
    return [request.answer.ids for request in requests]


class Dispatches(TorchDispatchMode):
    """Counts calls of operators, views too; a replay is none of them."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        return function(*arguments, **(options or {}))
