"""The server: HTTP in the main process, and a worker process for each device (`processes.py`)."""

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import uvicorn
from omegaconf import DictConfig, OmegaConf

from slipstream.commands import Decoding
from slipstream.configuration import build
from slipstream.core.errors import InputError, enough_memory
from slipstream.core.settings import Budget, Ge, Le, Settings, Size, Text
from slipstream.decoding.calibration import undrafted
from slipstream.drafters.base import Drafter
from slipstream.serving.adapting import AdaptingEngine
from slipstream.serving.application import Application
from slipstream.serving.connections import Connection
from slipstream.serving.counts import Counts
from slipstream.serving.processes import Workers, check_free, ending_on_signals
from slipstream.serving.worker import Worker
from slipstream.targets.compiled import compile_target

HOSTS = ("127.0.0.1", "0.0.0.0", "::")
Port = Annotated[int, Ge(1024), Le(65535)]
IDLE_SECONDS, END_SECONDS, CUT_SECONDS = 75, 30, 5
"""How long a connection may wait for its next request (proxies close theirs after 60), open answers
for their end when the server is told to end, and connections that do not close even then."""


class Listening(uvicorn.Server):
    """Ends when it is told to. Answers that are open after `END_SECONDS`, or at a second Ctrl-C,
    end with a sentence."""

    def __init__(self, config: uvicorn.Config, workers: Workers):
        super().__init__(config)
        self.workers = workers

    def handle_exit(self, sig: int, frame: object) -> None:
        if self.should_exit and sig == signal.SIGINT:
            asyncio.get_running_loop().call_soon_threadsafe(self.workers.end_open)
            sig = signal.SIGTERM  # uvicorn would drop what is open, with a traceback for each
        super().handle_exit(sig, frame)

    async def shutdown(self, *given, **named) -> None:
        end = asyncio.get_running_loop().call_later(END_SECONDS, self.workers.end_open)
        await super().shutdown(*given, **named)
        end.cancel()


@dataclass
class Server(Settings):
    """How it is served. model: the name that clients ask for; api_key_variable: the environment
    variable that holds a key which clients must show, None for no key; max_running: requests that
    are answered together by one worker; max_waiting: how many more may wait; prefill_rows: tokens
    of a prompt that are read between two steps; adaptive: whether trees shrink as the batch grows;
    devices: how many, "auto" for all."""

    section = "server"
    model: Text = "slipstream"
    host: Literal[HOSTS] = "127.0.0.1"
    port: Port = 8000
    api_key_variable: Text | None = None
    max_running: Size = 16
    max_waiting: Annotated[int, Ge(0), Le(65536)] = 64
    prefill_rows: Size = 256
    adaptive: bool = True
    devices: Size | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.key = os.environ.get(self.api_key_variable or "")
        if self.api_key_variable and not self.key:
            raise InputError(
                f"server.api_key_variable: the environment has no {self.api_key_variable}; set it "
                "to the key"
            )

    def workers(self, device: str, whole: bool = False) -> tuple[str, list[int]]:
        """The kind of device, and the numbers of those that have a worker each; device: as
        target.device has it; whole: whether one worker has them all."""
        kind, _, number = device.partition(":")
        if kind == "auto":
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        found = {"cuda": torch.cuda.device_count(), "mps": 1, "cpu": 1}.get(kind, 0)
        if not found or not (number or "0").isdecimal():
            raise InputError(f"target.device: {device!r} is not available here; try 'cpu'")
        most = 1 if number or whole else found
        if self.devices != "auto" and self.devices > most:
            raise InputError(
                f"server.devices: {self.devices} workers have {most} of the kind {kind!r} to work "
                "on; give fewer, or auto"
            )
        count = most if self.devices == "auto" else self.devices
        return kind, [int(number)] if number else list(range(count))

    def run(self, config: DictConfig) -> None:
        """Serve what `Serve` describes until the process is told to end."""
        check_free(self.host, self.port)
        whole = config.target.get("device_map") is not None
        kind, numbers = self.workers(config.target.device, whole)
        names = [f"{kind}:{number}" if kind == "cuda" else kind for number in numbers]
        told = self.model, build(config.sampling), build(config.limits), self.key
        with ending_on_signals(), Workers(self, config, names) as workers:
            app = Application(workers, *told).app(workers.listening)
            options = dict(log_level="warning", access_log=False, http=Connection)
            options |= dict(timeout_keep_alive=IDLE_SECONDS)
            options |= dict(timeout_graceful_shutdown=END_SECONDS + CUT_SECONDS)
            server = Listening(uvicorn.Config(app, self.host, self.port, **options), workers)
            check_free(self.host, self.port)  # still, after the models were read
            workers.watch(server)
            with suppress(KeyboardInterrupt):  # a signal, again, when all is answered
                server.run()
        if workers.board.said:
            raise InputError(workers.board.said)

    def worker(self, config: DictConfig, device: str, counts: Counts) -> Worker:
        """A worker on a device at its start, made in the process that works there."""
        if config.threads:
            torch.set_num_threads(config.threads)
        target = build(OmegaConf.merge(config.target, {"device": device}))
        target = compile_target(target, config.engine.compile)
        attached = build(config.drafter).attach(target)
        given = build(config.sampling), build(config.limits)
        if config.budget == 1:
            decoder = undrafted(target, attached, *given)
        else:
            decoder = AdaptingEngine(target, attached, *given, config.budget)
            if self.adaptive:
                with enough_memory("server.max_running", "lower it"):
                    decoder.measure(self.max_running)
        return Worker(decoder, self.max_running, self.prefill_rows, counts)


@dataclass(kw_only=True)
class Serve(Decoding):
    """What the keys of conf/serve.yaml may be."""

    budget: Budget
    host: Literal[HOSTS]
    port: Port
    drafter: Drafter
    server: Server
