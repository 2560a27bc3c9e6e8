"""The server on LitServe: one process for HTTP, and a worker process for each device.

`OpenAISpec` could not carry what the API needs: it writes finish_reason "stop" whatever ended the
answer, cuts all of `n` choices where the shortest ends, ignores `seed`, counts no accepted drafts,
has errors of its own shape, and never tells a worker that a client has gone. So its endpoint is
ours (`Application`), and of LitServe are the processes, their queues, the devices and the health
check. Open requests are bounded, and cancelled, through memory that all processes share (`Board`).
"""

import logging
import os
import threading
from dataclasses import dataclass
from typing import Annotated, Literal
from uuid import uuid4

import litserve
import torch
from litserve.loops.base import LitLoop
from litserve.specs.openai import OpenAISpec
from litserve.utils import LitAPIStatus, LoopResponseType, ResponseBufferItem
from omegaconf import DictConfig, OmegaConf

from slipstream.commands import Decoding
from slipstream.configuration import build
from slipstream.core.errors import InputError, enough_memory
from slipstream.core.settings import Budget, Ge, Le, Settings, Size, Text
from slipstream.decoding.calibration import undrafted
from slipstream.drafters.base import Drafter
from slipstream.serving import processes
from slipstream.serving.adapting import AdaptingEngine
from slipstream.serving.application import Application, Open
from slipstream.serving.connections import Connection
from slipstream.serving.counts import Board, Counts
from slipstream.serving.jobs import Asked, Job, Told
from slipstream.serving.worker import Worker
from slipstream.targets.compiled import compile_target

HOSTS = ("127.0.0.1", "0.0.0.0", "::")
Port = Annotated[int, Ge(1024), Le(65535)]


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
        target.device has it; whole: whether one worker has them all. (LitServe asks `nvidia-smi`,
        which knows nothing of what torch sees.)"""
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
        processes.check_free(self.host, self.port)
        whole = config.target.get("device_map") is not None
        kind, numbers = self.workers(config.target.device, whole)
        board = Board(len(numbers) * self.max_running + self.max_waiting, workers=len(numbers))
        sampling, limits = build(config.sampling), build(config.limits)
        spec = Spec(board, self.model, sampling, limits, self.key)
        server = processes.Processes(
            Api(self, config, spec),
            accelerator=kind,
            devices=numbers if kind == "cuda" else 1,
            timeout=False,
            disable_openapi_url=True,
        )
        spec.application.install(server.app)
        try:
            with processes.ending_on_signals():
                server.run(
                    host=self.host,
                    port=self.port,
                    num_api_servers=1,  # which alone takes places on the board
                    log_level="warning",
                    generate_client_file=False,
                    access_log=False,
                    http=Connection,
                )
        except RuntimeError:  # the workers could not be set up
            if not board.sentence.value:
                raise
        if board.sentence.value:
            raise InputError(board.sentence.value.decode())

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


class Spec(OpenAISpec):
    """LitServe's side of the application: jobs go out on its queue, and what is told comes back
    into its buffer. told: what the application is told."""

    def __init__(self, board: Board, *told):
        super().__init__()
        self.board = board
        self.application = Application(self, *told)

    def pre_setup(self, lit_api: "Api") -> None:
        for path, endpoint, methods in self.application.routes:
            self.add_endpoint(path, endpoint, methods)

    @property
    def crowded(self) -> bool:
        """Whether no worker has seen yet that the clients of many jobs have gone: their places are
        free again, but they still wait."""
        return self.request_queue.qsize() >= len(self.board.owners)

    def open(self, jobs: list[Job], places: list[tuple[int, int]]) -> "OpenJobs":
        opened = OpenJobs(self, places)
        for index, (job, place) in enumerate(zip(jobs, places, strict=True)):
            self.request_queue.put((self.response_queue_id, opened.uid, index, job, *place))
        return opened


class OpenJobs(Open):
    """The jobs of one request: they have one entry in LitServe's buffer, where their news come."""

    def __init__(self, spec: Spec, places: list[tuple[int, int]]):
        super().__init__(spec.board, places)
        self.buffer, self.uid = spec.response_buffer, str(uuid4())
        self.buffer[self.uid] = ResponseBufferItem(event=self.event, response_queue=self.news)

    def close(self) -> None:
        self.buffer.pop(self.uid, None)
        super().close()


class Api(litserve.LitAPI):
    """A worker process: its set-up makes the decoder; requests are the loop's."""

    def __init__(self, server: Server, config: DictConfig, spec: Spec):
        super().__init__(spec=spec, loop=EngineLoop(), api_path=spec.api_path)
        self.server, self.config, self.board = server, config, spec.board
        self.worker: Worker | None = None

    def setup(self, device: str) -> None:
        number = int(os.environ["LITSERVE_WORKER_ID"])
        try:
            counts = Counts(self.board.cells[number])
            self.worker = self.server.worker(self.config, device, counts)
        except InputError as error:
            self.board.sentence.value = str(error).encode()[:4000]
            logging.getLogger("litserve.loops.loops").disabled = True  # the sentence says it
            raise


class EngineLoop(LitLoop):
    """LitServe's loop of a worker, which takes requests from the queue, as many as it may have at a
    time, so that others get their share."""

    def __call__(self, lit_api: Api, device, worker_id, request_queue, transport, *_) -> None:
        worker, board = lit_api.worker, lit_api.board
        places = threading.Semaphore(worker.most_running)

        def receive() -> Asked | None:
            places.acquire()
            try:
                number, uid, index, job, place, ticket = request_queue.get()
            except (EOFError, OSError):  # the server is gone
                return None

            def tell(told: Told) -> None:
                if told.last:
                    places.release()
                kind = LitAPIStatus.OK, LoopResponseType.STREAMING
                self.put_response(transport, number, uid, (index, told), *kind)

            return Asked(job, tell, lambda: board.owners[place] != ticket)

        threading.Thread(target=processes.end_with_parent, daemon=True).start()
        worker.work(receive)
