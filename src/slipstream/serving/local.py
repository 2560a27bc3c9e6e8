"""A worker in a thread of the same process, behind the application: for Ray Serve, whose replicas
are processes already."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from functools import partial

from prometheus_client import generate_latest

from slipstream.serving.application import Backend, Open
from slipstream.serving.counts import Exposed
from slipstream.serving.worker import Asked, Job, Told, Worker


class LocalBackend(Backend):
    """Up to `places` jobs at a time, waiting ones among them, are answered by `worker`."""

    def __init__(self, worker: Worker, model: str, places: int):
        self.places, self.now_open = places, 0
        self.lock, self.arrived = threading.Lock(), queue.SimpleQueue()
        self.model, self.counts = model, worker.counts
        threading.Thread(target=worker.work, args=(self.arrived.get,), daemon=True).start()

    def open(self, jobs: list[Job]) -> "LocalJobs | None":
        with self.lock:
            if self.now_open + len(jobs) > self.places:
                return None
            self.now_open += len(jobs)
        opened = LocalJobs(self)
        for index, job in enumerate(jobs):
            self.arrived.put(Asked(job, partial(opened.tell, index), lambda: opened.closed))
        return opened

    def metrics(self) -> bytes:
        return generate_latest(Exposed(self.model, [self.counts], self.now_open))


class LocalJobs(Open):
    """Their news come through the event loop of the server."""

    def __init__(self, backend: LocalBackend):
        self.backend, self.loop = backend, asyncio.get_running_loop()
        self.news: asyncio.Queue[tuple[int, Told]] = asyncio.Queue()
        self.closed = False

    def tell(self, index: int, told: Told) -> None:
        if told.last:
            with self.backend.lock:
                self.backend.now_open -= 1
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.news.put_nowait, (index, told))

    async def told(self) -> AsyncIterator[tuple[int, Told]]:
        while True:
            yield await self.news.get()

    def close(self) -> None:
        self.closed = True
