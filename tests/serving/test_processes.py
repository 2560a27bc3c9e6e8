"""Servers of their own: as it is configured by default, and one whose worker dies."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from tests.serving.conftest import ended, started
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
        assert all("a worker process has ended" in asked.text for asked, _ in found)
        log = server.log.read_text()
        assert "\nerror: a worker process has ended" in log
        assert "Traceback" not in log, log
    finally:
        if server.process.poll() is None:
            ended(server)


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
