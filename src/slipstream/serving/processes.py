"""The processes of a server: a worker for each device. They end together, and the last word is one
sentence.

Jobs go out on one queue, from which each worker takes as many as it may have at a time, so that
others get their share; what is told comes back through a pipe from each.
"""

import asyncio
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from multiprocessing import connection, parent_process

import uvicorn
from fastapi import FastAPI
from tqdm import tqdm

from slipstream.core.errors import InputError
from slipstream.serving.application import Open
from slipstream.serving.counts import Board, Counts
from slipstream.serving.jobs import Asked, Job, Told
from slipstream.serving.worker import Worker

LOST = "a process of the server has ended, often for want of memory; see the log and start it again"
ENDING = "the server was told to end before this answer was ready; ask again when it is back"
News = tuple[int, int, Told]
"""The number of a request, which of its jobs, and what is told of that."""


class Workers:
    """A process for each of `devices`, of a `Server`: the backend of `Application`. A context that
    begins when all are set up (`InputError` where one cannot be), and ends them."""

    def __init__(self, server, config, devices: list[str]):
        self.server, self.config, self.devices = server, config, devices
        self.spawning, self.ending = multiprocessing.get_context("spawn"), False
        places = len(devices) * server.max_running + server.max_waiting
        self.board, self.jobs = Board(places, len(devices)), self.spawning.Queue()
        self.opened: dict[int, Open] = {}
        self.numbers, self.sent = count(), 0
        self.pipes: list[connection.Connection] = []
        self.processes: list[multiprocessing.Process] = []

    def __enter__(self) -> "Workers":
        try:
            with _signals_to(signal.SIG_IGN):  # this process ends them
                for number, device in enumerate(self.devices):
                    self._start(number, device)
            missing = set(self.pipes)
            while missing:
                for pipe in connection.wait(missing):
                    pipe.recv()
                    missing.discard(pipe)
        except EOFError:
            self.__exit__()
            raise InputError(self.board.said or LOST) from None
        except BaseException:  # they may be loading for a long time yet
            self.__exit__()
            raise
        return self

    def _start(self, number: int, device: str) -> None:
        here, there = self.spawning.Pipe(duplex=False)
        told = self.server, self.config, device, number, self.board, self.jobs, there
        process = self.spawning.Process(target=work, args=told)
        process.start()
        there.close()  # so that it ends with the process
        self.pipes.append(here)
        self.processes.append(process)

    def __exit__(self, *_: object) -> None:
        self.ending = True
        self.jobs.cancel_join_thread()
        with _signals_to(signal.SIG_IGN):
            for process in self.processes:
                process.kill()  # nobody waits for it now
            for process in self.processes:
                process.join()

    def watch(self, server: uvicorn.Server) -> None:
        """End the server, with a sentence for what is open, as soon as a process has ended."""

        def watch() -> None:
            connection.wait([process.sentinel for process in self.processes])
            if not self.ending:
                self.board.say(self.board.said or LOST)
                server.should_exit = True

        threading.Thread(target=watch, daemon=True).start()

    @asynccontextmanager
    async def listening(self, _: FastAPI) -> AsyncIterator[None]:
        """Within, the event loop passes on what is told."""
        loop = asyncio.get_running_loop()

        def arrive(pipe: connection.Connection) -> None:
            try:
                told: list[News] = pipe.recv()
            except (EOFError, OSError):
                loop.remove_reader(pipe.fileno())
                return
            for number, index, each in told:
                if number in self.opened:
                    self.opened[number].arrive(index, each)

        for pipe in self.pipes:
            loop.add_reader(pipe.fileno(), arrive, pipe)
        yield
        for pipe in self.pipes:
            loop.remove_reader(pipe.fileno())

    @property
    def crowded(self) -> bool:
        """Whether no worker has seen yet that the clients of many jobs have gone: their places are
        free again, but they still wait."""
        received = sum(Counts(cells)["received"] for cells in self.board.cells)
        return self.sent - received >= len(self.board.owners)

    def open(self, jobs: list[Job], places: list[tuple[int, int]]) -> Open:
        number = next(self.numbers)
        opened = Open(self.board, places, partial(self.opened.pop, number, None))
        self.opened[number] = opened
        for index, (job, place) in enumerate(zip(jobs, places, strict=True)):
            self.jobs.put((number, index, job, *place))
        self.sent += len(jobs)
        return opened

    def end_open(self) -> None:
        """Tell all that are answered that the server ends."""
        for opened in self.opened.values():
            opened.arrive(0, Told(refused=ENDING, failed=True))


def work(server, config, device: str, number: int, board: Board, jobs, pipe) -> None:
    """The process of a worker."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is of all processes, and left when one is killed
    try:
        worker = server.worker(config, device, Counts(board.cells[number]))
    except InputError as error:
        board.say(str(error))
        sys.exit(2)
    pipe.send(None)
    answer(worker, board, jobs, _sending(pipe))


def answer(worker: Worker, board: Board, jobs, tell: Callable[[News], None]) -> None:
    """Take jobs from the queue and answer them."""
    places = threading.Semaphore(worker.most_running)

    def receive() -> Asked | None:
        places.acquire()
        try:
            number, index, job, place, ticket = jobs.get()
        except (EOFError, OSError):  # the server is gone
            return None
        worker.counts["received"] += 1

        def told(news: Told) -> None:
            if news.last:
                places.release()
            tell((number, index, news))

        return Asked(job, told, lambda: board.owners[place] != ticket)

    worker.work(receive)


def _sending(pipe: connection.Connection) -> Callable[[News], None]:
    """What is called to tell something: a thread sends it, with all that has come meanwhile."""
    told: queue.SimpleQueue[News] = queue.SimpleQueue()

    def send() -> None:
        while True:
            news = [told.get()]
            while not told.empty():
                news.append(told.get())
            pipe.send(news)

    threading.Thread(target=send, daemon=True).start()
    return told.put


def _end_with_parent() -> None:
    """In a thread of a worker: end it when the main process has ended without a word to it."""
    connection.wait([parent_process().sentinel])
    os._exit(1)


@contextmanager
def _signals_to(handler) -> Iterator[None]:
    """Within, `handler` takes SIGINT and SIGTERM; who starts within ignores what is ignored."""
    before = {each: signal.signal(each, handler) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, usual in before.items():
            signal.signal(each, usual)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Within, SIGTERM ends the server as Ctrl+C does, also where a shell had that ignored."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    with _signals_to(end):
        yield


def check_free(host: str, port: int) -> None:
    """`InputError` for a port that another program has."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(f"port: {port} is taken ({error.strerror}); choose another") from error
