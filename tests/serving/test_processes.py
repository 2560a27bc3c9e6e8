"""Servers of their own: as it is configured by default, and one whose worker dies."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from tests.commands import ROOT
from tests.serving.conftest import ended, free_port, started
from tests.serving.test_server import TEXTS, ask

from slipstream import generate


def worker_of(server) -> psutil.Process:
    """The process that decodes: of all, the one with the most memory of its own."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return max(children, key=lambda each: each.memory_full_info().uss)


@pytest.mark.exhaustive
def test_a_worker_that_dies_ends_open_requests_and_the_server(tmp_path):
    server = started(tmp_path, "threads=1", "server.adaptive=false", "server.max_running=1")
    body = dict(prompt="name[The Mill]", max_tokens=900)
    found = []

    def ask(**changes) -> None:
        asked = httpx.post(f"{server.url}/v1/completions", json=body | changes, timeout=60)
        found.append((asked, time.monotonic()))

    clients = [threading.Thread(target=ask, kwargs=dict(stream=each)) for each in (False, True)]
    try:
        worker = worker_of(server)
        worker.suspend()  # however short the answers, they are open when it dies
        for client in clients:
            client.start()
        time.sleep(1)
        worker.kill()
        killed = time.monotonic()
        assert server.process.wait(20) == 2
        for client in clients:
            client.join(20)
        assert time.monotonic() - killed < 10
        assert len(found) == 2 and all(when - killed < 5 for _, when in found)
        assert all("a process of the server has ended" in asked.text for asked, _ in found)
        log = server.log.read_text()
        assert "\nerror: a process of the server has ended" in log
        assert "Traceback" not in log, log
    finally:
        if server.process.poll() is None:
            ended(server)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_lets_answers_end(tmp_path, number):
    """A terminal's Ctrl+C and systemd's stop go to the whole group."""
    server = started(tmp_path, "threads=1", "server.adaptive=false", group=True)
    found, body = [], dict(prompt="name[The Mill]", max_tokens=300, stream=True)

    def read() -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as told:
            found.extend(told.iter_lines())

    client = threading.Thread(target=read)
    try:
        client.start()
        while not found:
            time.sleep(0.01)
        children = psutil.Process(server.process.pid).children(recursive=True)
        os.killpg(server.process.pid, number)
        assert server.process.wait(25) == 0
        client.join(20)
        assert "data: [DONE]" in found
        psutil.wait_procs(children, 20)  # the one that looks for what was leaked, too
        log = server.log.read_text()
        assert "Traceback" not in log and "leaked" not in log, log
    finally:
        if server.process.poll() is None:
            ended(server)


@pytest.mark.exhaustive
def test_workers_end_with_the_process_that_started_them(tmp_path):
    server = started(tmp_path, "threads=1", "server.adaptive=false")
    worker = worker_of(server)
    server.process.kill()
    server.process.wait(20)
    worker.wait(20)
    assert not worker.is_running()


@pytest.mark.exhaustive
def test_a_signal_while_workers_load_ends_all(tmp_path):
    """However long that would have taken."""
    command = [sys.executable, str(ROOT / "serve.py"), f"port={free_port()}"]
    process = subprocess.Popen(
        [*command, f"output_dir={tmp_path}"], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    parent = psutil.Process(process.pid)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not any(
        "spawn_main" in " ".join(each.cmdline()) for each in parent.children()
    ):
        time.sleep(0.05)
    children = parent.children(recursive=True)
    assert children
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 130
    _, alive = psutil.wait_procs(children, 20)
    assert not alive


@pytest.mark.exhaustive
def test_64_at_once_are_answered_as_alone_while_trees_shrink(tmp_path):
    alone = [generate(text, max_new_tokens=24).text for text in TEXTS]
    server = started(tmp_path, "threads=1")
    try:
        with ThreadPoolExecutor(64) as pool:
            found = list(pool.map(lambda text: ask(server, text, max_tokens=24), TEXTS))
        assert [each.choices[0].message.content for each in found] == alone
        assert server.quiet()
    finally:
        ended(server)
