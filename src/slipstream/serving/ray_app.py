"""The same application on Ray Serve, for more machines: each replica has a worker of its own.

    serve run slipstream.serving.ray_app:build replicas=2

A replica has a GPU of its own where this machine has one and `target.device` is not cpu (`gpus=`
says how many, or what share of one). Other arguments are those of serve.py. Ray balances over the
replicas, and binds to the loopback interface on the port of its own command;
`server.api_key_variable` holds there, too. Each replica's `/metrics` are its own: let Prometheus
read those of Ray for the whole.
"""

import asyncio
import logging
import os
import queue
import threading
from functools import partial

import torch
from fastapi import FastAPI
from omegaconf import DictConfig

from slipstream.configuration import build as instantiate
from slipstream.configuration import check_config
from slipstream.serving.application import Application, Open
from slipstream.serving.counts import Board, Counts
from slipstream.serving.jobs import Asked, Job, Told
from slipstream.serving.server import Serve
from slipstream.serving.worker import Worker

log = logging.getLogger(__name__)
CONF = os.path.join(os.path.dirname(__file__), *[os.pardir] * 3, "conf")


def build(arguments: dict[str, str]):
    """What `serve run` starts: `replicas`, and the overrides of serve.py."""
    from hydra import compose, initialize_config_dir
    from ray import serve

    replicas, gpus = int(arguments.pop("replicas", 1)), arguments.pop("gpus", None)
    overrides = [f"{name}={value}" for name, value in arguments.items()]
    with initialize_config_dir(os.path.abspath(CONF), version_base="1.3"):
        config = compose("serve", overrides)
    check_config(config, Serve)
    if gpus is None:
        gpus = torch.cuda.is_available() and config.target.device != "cpu"
    server = instantiate(config.server)
    most = 2 * (server.max_running + server.max_waiting)  # refusing is the application's part

    def made() -> FastAPI:  # in each replica
        return application(config)

    ingress = serve.ingress(made)()
    named = serve.deployment(ingress, name="slipstream")
    room = dict(num_replicas=replicas, max_ongoing_requests=most)
    return named.options(**room, ray_actor_options={"num_gpus": float(gpus)}).bind()


def application(config: DictConfig) -> FastAPI:
    """Over a worker in this process."""
    server, device = instantiate(config.server), config.target.device
    board = Board(server.max_running + server.max_waiting, workers=1)
    worker = server.worker(config, device, Counts(board.cells[0]))
    told = server.model, instantiate(config.sampling), instantiate(config.limits), server.key
    return Application(LocalBackend(worker, board), *told).app()


class LocalBackend:
    """As many jobs at a time as `board` has places, waiting ones among them, are answered by
    `worker`, which counts on it, in a thread of this process that sees at once who has gone."""

    crowded = False

    def __init__(self, worker: Worker, board: Board):
        self.board = board
        self.arrived: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(worker,), daemon=True).start()

    def _work(self, worker: Worker) -> None:
        try:
            worker.work(self.arrived.get)
        except BaseException:
            log.exception("the worker of this replica has failed; Ray starts another")
            os._exit(1)

    def open(self, jobs: list[Job], places: list[tuple[int, int]]) -> Open:
        opened, loop = Open(self.board, places), asyncio.get_running_loop()

        def tell(index: int, told: Told) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(opened.arrive, index, told)

        def gone(place: int, ticket: int) -> bool:
            return self.board.owners[place] != ticket

        for index, (job, place) in enumerate(zip(jobs, places, strict=True)):
            self.arrived.put(Asked(job, partial(tell, index), partial(gone, *place)))
        return opened
