"""The HTTP side over a worker in a thread: keys, slow clients, what is said of a failure."""

import asyncio
import json
import queue
import socket
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from tests.commands import config_of, refused
from tests.serving.conftest import free_port
from tests.serving.test_worker import engine

from slipstream import app
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.serving import application, connections
from slipstream.serving.application import Application, Open
from slipstream.serving.connections import Connection
from slipstream.serving.counts import Board, Counts
from slipstream.serving.jobs import Job, Told
from slipstream.serving.processes import Workers
from slipstream.serving.ray_app import LocalBackend
from slipstream.serving.server import Server
from slipstream.serving.worker import Worker

BODY = {"prompt": "w9 w10 w11", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "w9"}]}


@pytest.fixture(scope="module")
def served():
    """A small application on a free port: its URL and its worker."""
    worker = Worker(engine(), 2, 8, Counts())
    backend = LocalBackend(worker, Board(4, 1))
    own = Application(backend, "mine", Sampling(), Limits(6), "secret")
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(own.app(), port=port, log_level="critical", http=Connection)
    )
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
    bare, lower = (
        httpx.get(f"{url}/v1/models", headers={"Authorization": sent})
        for sent in ("secret", "bearer secret")
    )
    assert (bare.status_code, lower.status_code) == (401, 200)
    models = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer secret"})
    assert models.json()["data"][0]["id"] == "mine"
    for name, status in (("mine", 200), ("other/one", 404)):
        one = httpx.get(f"{url}/v1/models/{name}", headers={"Authorization": "Bearer secret"})
        assert one.status_code == status and one.json().get("id", "mine") == "mine"
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


class Scripted(Open):
    """A backend that tells what it was given."""

    crowded = False

    def __init__(self, *news: tuple[int, Told]):
        self.news, self.closed, self.board = news, False, Board(4, 1)

    def open(self, jobs, places):
        return self

    async def told(self):
        for each in self.news:
            yield each

    def close(self) -> None:
        self.closed = True

    def post(self, **changes) -> httpx.Response:
        """The answer to a request to an application over it."""
        own = Application(self, "mine", Sampling(), Limits(), None)

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(own.app())
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.post("/v1/completions", json=BODY | changes)

        return asyncio.run(ask())


def test_each_choice_of_a_stream_has_its_end_once_and_its_text_once():
    ends = [Told(text=f"{each}!", finish_reason=reason) for each, reason in ("ax", "by")]
    first = [(0, Told(accepted=True)), (0, Told(text="A")), (0, ends[0])]
    found = Scripted(*first, (1, Told(accepted=True)), (1, ends[1])).post(n=2, stream=True)
    lines = [line.removeprefix("data: ") for line in found.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert [(each["index"], each["text"], each["finish_reason"]) for each in choices] == [
        (0, "A", None), (0, "a!", "x"), (1, "b!", "y")
    ]  # fmt: skip


def test_more_choices_than_there_will_ever_be_places_for_are_refused():
    found = Scripted().post(n=5)
    assert found.status_code == 400 and found.json()["error"]["param"] == "n"
    assert found.json()["error"]["message"].startswith("n: this server answers 4 choices of all")


def test_jobs_of_clients_that_have_gone_do_not_pile_up():
    """A busy worker has not seen yet that they are gone; their places are free."""
    backend = Scripted()
    backend.crowded = True
    assert backend.post().status_code == 429
    workers = Workers(SimpleNamespace(max_running=1, max_waiting=1), None, ["cpu"])
    workers.jobs, crowded = queue.Queue(), []
    job = Job("w9", Sampling(), Limits(), 0, False)

    async def ask_and_go() -> None:
        for _ in range(3):
            crowded.append(workers.crowded)
            workers.open([job], workers.board.take(1)).close()

    asyncio.run(ask_and_go())
    Counts(workers.board.cells[0])["received"] += 2
    assert [*crowded, workers.crowded] == [False, False, True, False] and not workers.opened


@pytest.mark.parametrize("streamed", [False, True])
def test_a_refused_request_is_closed(streamed):
    backend = Scripted((0, Told(refused="prompt: it is too long; shorten it")))
    assert backend.post(stream=streamed).status_code == 400 and backend.closed


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


def sent_to(url: str, *parts: bytes) -> socket.socket:
    """A connection over which these were sent."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=20)
    for part in parts:
        client.sendall(part)
    return client


@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"])
@pytest.mark.parametrize("begun", [b"", b"POST /v1/completions HTTP/1.1\r\nHo"])
def test_a_head_that_does_not_come_is_not_waited_for(served, monkeypatch, first, begun):
    """Of the first request of a connection, or of the second."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with sent_to(served[0], first) as client:
        if first:
            assert client.recv(9999)
        client.sendall(begun)
        if first and not begun:
            return  # between requests uvicorn's own patience counts
        told = client.makefile("rb").read()
    head, _, body = told.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert "did not arrive within" in json.loads(body)["error"]["message"]


def test_an_answer_may_take_longer_than_a_head(served, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    step = served[1].decoder.step
    monkeypatch.setattr(served[1].decoder, "step", lambda: time.sleep(0.03) or step())
    assert post(served[0], max_tokens=40).json()["usage"]["completion_tokens"] == 40


def test_a_client_that_does_not_read_is_given_up(served, monkeypatch):
    """Its answer is more than what the connection holds, and what it has not read is dropped."""
    monkeypatch.setattr(connections, "READ_SECONDS", 0.2)
    monkeypatch.setattr(application, "_event", lambda content: "x" * 2**20)
    content = json.dumps(BODY | {"max_tokens": 100, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content)
    url, worker = served
    with sent_to(url, head + content) as client:
        time.sleep(2)
        deadline = time.monotonic() + 20
        while not worker.idle and time.monotonic() < deadline:
            time.sleep(0.02)
        assert worker.idle
        read = 0
        with suppress(ConnectionResetError):
            while part := client.recv(2**20):
                read += len(part)
        assert read < 50 * 2**20


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
    board.free(*first)
    (again,) = board.take(1)
    assert again[0] == first[0] and again[1] != first[1]
    board.free(*first)  # the first client goes only now
    assert board.owners[again[0]] == again[1]
    assert len({place for place, _ in [again, *rest]}) == 3


BAD = {
    "no JSON": ("{", 400, "the body is no valid JSON"),
    "no object": ("[1]", 400, "body: "),
    "no messages": ({}, 400, "messages: "),
    "empty messages": ({"messages": []}, 400, "messages: "),
    "a message without content": ({"messages": [{"role": "user"}]}, 400, "messages.0.content: "),
    "a role of the past": (
        {"messages": [{"role": "assistant", "content": "x"}]},
        400,
        "messages: ",
    ),
    "a number in quotes": ({"max_tokens": "7"}, 400, "max_tokens: "),
    "no tokens": ({"max_tokens": 0}, 400, "max_tokens: "),
    "huge max_tokens": ({"max_tokens": 10**12}, 400, "max_tokens: the model's context has 128"),
    "hot": ({"temperature": 5}, 400, "temperature: "),
    "not a number": ('{"messages": [], "temperature": NaN}', 400, ""),
    "top_p": ({"top_p": 0}, 400, "top_p: "),
    "many choices": ({"n": 1000}, 400, "n: "),
    "a huge seed": ({"seed": 2**70}, 400, "seed: "),
    "another model": ({"model": "gpt-5"}, 404, "the model 'gpt-5' does not exist"),
    "tools": ({"tools": [{"type": "function"}]}, 400, "tools: this server has no such option"),
    "JSON mode": ({"response_format": {"type": "json_object"}}, 400, "response_format: "),
    "a long prompt": (
        {"messages": [{"role": "user", "content": "w9 " * 200}]},
        400,
        "prompt: ",
    ),
    "invalid UTF-8": (b'{"messages": "\xff"}', 400, "the body is no valid UTF-8"),
    "a lone surrogate": ('{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, ""),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_ends_with_the_apis_error_and_a_sentence(served, name, streamed):
    body, status, sentence = BAD[name]
    if isinstance(body, dict):
        body = json.dumps(CHAT | {"stream": streamed} | body)
        body = "{}" if name == "no messages" else body
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    path = f"{served[0]}/v1/chat/completions"
    found = httpx.post(path, content=body, headers=headers, timeout=60)
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].startswith(sentence) and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["host=example.org"], "host: must be one of 127.0.0.1"),
        (["port=80"], "port: must be a whole number, at least 1024"),
        (["server.max_running=0"], "server.max_running: must be a whole number, at least 1"),
        (["server.api_key_variable=NO_SUCH"], "server.api_key_variable: the environment has no"),
        (["+server.workers=3"], "server.workers: unknown config key"),
        (["+seeds=1"], "seeds: unknown config key"),
        (["+both_commands=true"], "both_commands: unknown config key"),
        (["target.device=meta"], "target.device: a target on 'meta'"),
        (["limits.max_new_tokens=0"], "limits.max_new_tokens: must be a whole number, at least 1"),
    ],
)
def test_a_server_that_cannot_be_is_refused_in_a_sentence(given, sentence):
    assert refused(lambda: app.serve(config_of("serve", *given))).startswith(sentence)


def test_a_taken_port_is_refused_in_a_sentence(served):
    port = int(served[0].rpartition(":")[2])
    server = Server(port=port)
    message = refused(lambda: server.run(config_of("serve")))
    assert message.startswith(f"port: {port} is taken")


@pytest.mark.exhaustive
def test_what_a_worker_cannot_load_ends_the_server_with_its_sentence(tmp_path):
    config = config_of("serve", f"port={free_port()}", f"speculator_path={tmp_path}/nothing")
    assert "nothing" in refused(lambda: app.serve(config))
