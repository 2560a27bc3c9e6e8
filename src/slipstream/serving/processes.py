"""The processes of a server on LitServe: they end together, and the last word is one sentence."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection

import litserve
from litserve.utils import WorkerSetupStatus

from slipstream.core.errors import InputError
from slipstream.serving.counts import Board

LOST = (
    "a worker process has ended, often for want of memory; see the log and start the server again"
)


class Processes(litserve.LitServer):
    """LitServe's server, which ends as soon as a worker process has. LitServe's own watch lets
    open requests hang, and ends in a traceback."""

    ending = False

    def launch_inference_worker(self, lit_api: litserve.LitAPI) -> list:
        self._monitor_workers = False
        workers = super().launch_inference_worker(lit_api)
        watch = threading.Thread(target=self._watch, args=(workers, lit_api.board), daemon=True)
        watch.start()
        return workers

    def _watch(self, workers: list, board: Board) -> None:
        connection.wait([each.sentinel for each in workers])
        if self.ending:
            return
        board.sentence.value = board.sentence.value or LOST.encode()
        with suppress(OSError, EOFError):  # the server is ending already
            for name in list(self.workers_setup_status.keys()):  # while others are being set up
                self.workers_setup_status[name] = WorkerSetupStatus.ERROR
            self._shutdown_event.set()

    def _perform_graceful_shutdown(self, *given) -> None:
        self.ending = True
        super()._perform_graceful_shutdown(*given)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Within, SIGTERM ends the server as Ctrl+C does, also where a shell had that ignored."""
    own = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() != own:  # the HTTP process, which has shut down when this comes
            os._exit(0)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def check_free(host: str, port: int) -> None:
    """`InputError` for a port that another program has."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(f"port: {port} is taken ({error.strerror}); choose another") from error
