"""The HTTP side over a worker in a thread: keys, slow clients, what is said of a failure."""

import asyncio
import json
import threading
import time

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from tests.commands import config_of, refused
from tests.serving.conftest import free_port
from tests.serving.test_worker import engine

from slipstream import app
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.serving import application
from slipstream.serving.application import Application, Settings
from slipstream.serving.counts import Counts
from slipstream.serving.local import LocalBackend
from slipstream.serving.server import Board, Server
from slipstream.serving.worker import Worker

BODY = {"prompt": "w9 w10 w11", "max_tokens": 4}


@pytest.fixture(scope="module")
def served():
    """A small application on a free port: its URL and its worker."""
    worker = Worker(engine(), 2, 8, Counts())
    settings = Settings("mine", Sampling(), Limits(6), "secret")
    own = Application(settings, LocalBackend(worker, "mine", 4))
    api, port = FastAPI(), free_port()
    for path, endpoint, methods in own.routes:
        api.add_api_route(path, endpoint, methods=methods)
    own.install(api)
    server = uvicorn.Server(uvicorn.Config(api, port=port, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}", worker
    server.should_exit = True
    thread.join()


def post(url: str, key: str | None = "secret", path: str = "/v1/completions", **changes):
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
    return httpx.post(url + path, json=BODY | changes, headers=headers, timeout=60)


def test_a_key_is_asked_for(served):
    url, _ = served
    for key in (None, "wrong", "secret2", "sécret"):
        found = post(url, key)
        assert found.status_code == 401
        assert found.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{url}/v1/models").status_code == 401
    assert post(url).status_code == 200
    models = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer secret"})
    assert models.json()["data"][0]["id"] == "mine"
    assert httpx.get(f"{url}/metrics").status_code == 200


def test_what_is_not_asked_for_is_as_the_server_is_configured(served):
    url, _ = served
    found = post(url, max_tokens=None).json()
    assert found["usage"]["completion_tokens"] == 6
    assert found["choices"][0]["finish_reason"] == "length"


def test_a_refusal_in_the_midst_of_others_is_the_whole_answer(served):
    url, _ = served
    for streamed in (False, True):
        found = post(url, n=3, stream=streamed, prompt="w9 " * 200)
        assert found.status_code == 400
        assert found.json()["error"]["code"] == "context_length_exceeded"


def test_a_failure_is_the_servers_and_says_so(served, monkeypatch):
    url, worker = served

    def failing():
        raise RuntimeError("a secret of the machine")

    monkeypatch.setattr(worker.decoder, "step", failing)
    found = post(url)
    assert found.status_code == 500 and found.json()["error"]["type"] == "server_error"
    assert "secret of" not in found.text
    lines = [line for line in post(url, stream=True).text.splitlines() if line]
    assert "error" in json.loads(lines[-1].removeprefix("data: "))
    monkeypatch.undo()
    assert post(url).status_code == 200


def test_a_client_that_sends_slowly_is_told_so(served, monkeypatch):
    url, _ = served
    monkeypatch.setattr(application, "BODY_SECONDS", 0.2)

    def slowly():
        yield b"{"
        time.sleep(0.6)
        yield b"}"

    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    found = httpx.post(f"{url}/v1/completions", content=slowly(), headers=headers)
    assert found.status_code == 408 and "did not arrive" in found.json()["error"]["message"]


def test_a_vanishing_client_leaves_nothing_open(served):
    url, worker = served

    async def vanish() -> None:
        async with httpx.AsyncClient() as client:
            headers = {"Authorization": "Bearer secret"}
            given = dict(json=BODY | {"max_tokens": 100}, headers=headers)
            task = asyncio.create_task(client.post(f"{url}/v1/completions", **given))
            await asyncio.sleep(0.05)
            task.cancel()

    for _ in range(8):
        asyncio.run(vanish())
    deadline = time.monotonic() + 20
    while not worker.idle and time.monotonic() < deadline:
        time.sleep(0.02)
    assert worker.idle and post(url, n=4).status_code == 200  # all places are free again


def test_a_place_belongs_to_its_ticket():
    board = Board(3, 1)
    assert board.take(4) is None
    (first,), rest = board.take(1), board.take(2)
    assert board.take(1) is None and board.open == 3
    board.owners[first[0]] = 0  # the worker is done with it
    (again,) = board.take(1)
    assert again[0] == first[0] and again[1] != first[1]
    board.gone[first[0]] = first[1]  # the first client goes only now
    assert board.gone[again[0]] != again[1]
    assert len({place for place, _ in [again, *rest]}) == 3


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["host=example.org"], "host: must be one of 127.0.0.1"),
        (["port=80"], "port: must be a whole number, at least 1024"),
        (["server.max_running=0"], "server.max_running: must be a whole number, at least 1"),
        (["server.api_key_variable=NO_SUCH"], "server.api_key_variable: the environment has no"),
        (["+server.workers=3"], "server.workers: unknown config key"),
        (["+seeds=1"], "seeds: unknown config key"),
        (["target.device=meta"], "target.device: a target on 'meta'"),
        (["limits.max_new_tokens=0"], "limits.max_new_tokens: must be a whole number, at least 1"),
    ],
)
def test_a_server_that_cannot_be_is_refused_in_a_sentence(given, sentence):
    assert refused(lambda: app.serve(config_of("serve", *given))).startswith(sentence)


def test_a_taken_port_is_refused_in_a_sentence(served):
    port = int(served[0].rpartition(":")[2])
    server = Server(port=port)
    message = refused(lambda: server.run(None, Settings("mine"), "cpu"))
    assert message.startswith(f"port: {port} is taken")


@pytest.mark.exhaustive
def test_what_a_worker_cannot_load_ends_the_server_with_its_sentence(tmp_path):
    config = config_of("serve", f"port={free_port()}", f"speculator_path={tmp_path}/nothing")
    assert "nothing" in refused(lambda: app.serve(config))
