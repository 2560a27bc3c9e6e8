"""The load test at small size: every request is answered, and the record has what it prints."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from tests.commands import ROOT
from tools.load import __main__ as command
from tools.load import overload
from tools.load.clients import Server, load


class Fake(BaseHTTPRequestHandler):
    """Answers at once, after the first 200 requests in the way that `after` names."""

    asked, after = 0, "right"

    def do_GET(self) -> None:
        self.reply(200, 'vllm:num_requests_running{model_name="fake"} 0.0\n')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Fake.asked += 1
        other = self.after if Fake.asked == 200 else "right"
        choices = [{"message": {"content": other if other == "wrong" else "right"}}]
        found = {"choices": choices, "usage": {"completion_tokens": 1}}
        self.reply(500 if other == "lost" else 200, json.dumps(found))

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    "after", ["right", "wrong", pytest.param("lost", marks=pytest.mark.exhaustive)]
)
def test_one_answer_that_is_wrong_or_lost_fails_an_overload(tmp_path, monkeypatch, after):
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 128)
    fake = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    threading.Thread(target=fake.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{fake.server_port}"

    @contextmanager
    def serving(*_):
        yield Server(SimpleNamespace(pid=os.getpid()), url, "fake")

    monkeypatch.setattr(Fake, "asked", 0)
    monkeypatch.setattr(Fake, "after", after)
    monkeypatch.setattr(command, "serving", serving)
    monkeypatch.setattr(overload, "CROWD", 10)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    given = ["load", "--overload", "0.03", "--rate", "20", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", given)
    if after == "right":
        command.main()
    else:
        with pytest.raises(SystemExit, match=f"error: 1 answers are {after}"):
            command.main()
    (row,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert row["answer"] > 50 and row["wrong"] + row["lost"] == (after != "right")
    fake.shutdown()
    # ten clients, twenty requests a second each, for 1.8 seconds
    assert row["answer"] <= 10 * (20 * 2.8 + 1)


@pytest.mark.parametrize(
    ("memory", "still_open", "sentence"),
    [
        ([90, 100, 105], 0, None),
        ([90, 100, 106], 0, "memory has grown from 100 to 106 MiB"),
        ([90], 0, None),
        ([90], 3, "3 requests are still open"),
    ],
)
def test_an_overload_fails_where_memory_grows_or_requests_stay(memory, still_open, sentence):
    rows = [{"MiB": each, "wrong": 0, "lost": 0} for each in memory]
    found = overload.failure(rows, still_open)
    assert found is None if sentence is None else found.startswith(sentence)


@pytest.mark.exhaustive
def test_seconds_begin_with_the_first_request_and_not_with_its_end(monkeypatch):
    """Of a server that answers one request after the other, in 0.8 s each."""

    class Slow(Fake):
        def reply(self, *given) -> None:
            time.sleep(0.8)
            super().reply(*given)

    server = HTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = Server(None, f"http://127.0.0.1:{server.server_port}", "slow")
    given = SimpleNamespace(
        tokens=4, rate=0, dtype="float32", models="slipstream/small-", data=None
    )
    seen = load(own, 1, 4, given, 0)
    server.shutdown()
    assert 0.75 * seen.tokens < seen.seconds < 1.3 * seen.tokens


@pytest.mark.exhaustive
def test_servers_are_compared_under_load(tmp_path):
    given = [sys.executable, "-m", "tools.load", "--clients", "2", "--seconds", "3"]
    given += ["--rounds", "2", "--tokens", "8", "--servers", "slipstream", "plain"]
    done = subprocess.run(
        [*given, "--output", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "results.json").read_text())
    ours, plain = record["results"]
    assert (ours["clients"], ours["server"], plain["server"]) == (2, "slipstream", "plain")
    assert ours["vs plain, low"] <= ours["vs plain"] <= ours["vs plain, high"]
    assert ours["vs plain"] == pytest.approx(ours["tokens/s"] / plain["tokens/s"], rel=0.2)
    assert plain["vs plain"] is None and plain["p95, s"] >= plain["p50, s"] > 0
    assert record["environment"]["commit"] and (tmp_path / "plot.png").stat().st_size > 0
