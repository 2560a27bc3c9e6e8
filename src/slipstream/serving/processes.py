"""The processes of a server on LitServe: they end together, and the last word is one sentence."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process

import litserve
from litserve.utils import WorkerSetupStatus

from slipstream.core.errors import InputError
from slipstream.serving.counts import Board

LOST = "a process of the server has ended, often for want of memory; see the log and start it again"
MOMENT = 0.5
"""Seconds in which a signal that all processes get has reached all of them."""


class Processes(litserve.LitServer):
    """LitServe's server, which ends as soon as one of its processes has; LitServe's own watch lets
    open requests hang, and ends in a traceback. Of signals that all processes get, as a terminal
    and systemd send them, this one and that of HTTP take notice, and end the others when all is
    answered."""

    ending = False

    def _init_manager(self, *given):
        with _handled(signal.SIG_IGN, signal.SIGTERM):  # SIGINT it ignores by itself
            return super()._init_manager(*given)

    def launch_inference_worker(self, lit_api: litserve.LitAPI) -> list:
        self._monitor_workers, self.board = False, lit_api.board
        with _handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):
            workers = super().launch_inference_worker(lit_api)
        self._end_with(workers)
        return workers

    def verify_worker_status(self) -> None:
        try:
            super().verify_worker_status()
        except BaseException:  # they may be loading for a long time yet
            self.ending = True
            for each in self.inference_workers:
                each.kill()
            raise

    def _start_server(self, *given, **options) -> dict:
        servers = super()._start_server(*given, **options)
        self._end_with(list(servers.values()))
        return servers

    def _end_with(self, processes: list) -> None:
        threading.Thread(target=self._watch, args=(processes, self.board), daemon=True).start()

    def _watch(self, processes: list, board: Board) -> None:
        connection.wait([each.sentinel for each in processes])
        time.sleep(MOMENT)
        if self.ending:
            return
        board.sentence.value = board.sentence.value or LOST.encode()
        with suppress(OSError, EOFError):  # the server is ending already
            for name in list(self.workers_setup_status.keys()):  # while others are being set up
                self.workers_setup_status[name] = WorkerSetupStatus.ERROR
            self._shutdown_event.set()

    def _perform_graceful_shutdown(self, manager, servers: dict, *given) -> None:
        self.ending = True
        for each in servers.values():
            each.terminate()
            each.join(1 + self.uvicorn_graceful_timeout)
        for each in (*servers.values(), *self.inference_workers):  # nobody waits for them now
            each.kill()
        super()._perform_graceful_shutdown(manager, {}, *given)


def end_with_parent() -> None:
    """In a thread of a worker: end it when the main process has ended without a word to it."""
    if (parent := parent_process()) is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


@contextmanager
def _handled(handler, *signals: signal.Signals) -> Iterator[None]:
    """Within, `handler` takes these signals; processes started within ignore what is ignored."""
    before = {each: signal.signal(each, handler) for each in signals}
    try:
        yield
    finally:
        for each, usual in before.items():
            signal.signal(each, usual)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Within, SIGTERM ends the server as Ctrl+C does, also where a shell had that ignored."""
    own = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() != own:  # the HTTP process, which has shut down when this comes
            os._exit(0)
        raise KeyboardInterrupt

    with _handled(end, signal.SIGTERM, signal.SIGINT):
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
