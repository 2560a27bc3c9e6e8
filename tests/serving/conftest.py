"""The server as users start it, on a free port of the loopback interface, once for all tests."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from tests.commands import ROOT

PLACES = 8 + 60
"""Of open requests."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Running:
    """A server at work. process: of the command; url: where it answers."""

    process: subprocess.Popen
    url: str
    log: Path

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def counts(self) -> dict[str, float]:
        """What /metrics says, without the prefix and the model's name."""
        text = httpx.get(f"{self.url}/metrics").text
        lines = re.findall(r"^vllm:(\w+)\{(.*)\} (\S+)$", text, re.M)
        found = {}
        for name, labels, value in lines:
            own = [part for part in labels.split(",") if not part.startswith("model_name")]
            found[" ".join([name, *own]).replace('"', "")] = float(value)
        return found

    def quiet(self, seconds: float = 60) -> bool:
        """Wait until no request is open; whether that came about."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            counts = self.counts()
            if counts["num_requests_running"] == counts["num_requests_waiting"] == 0:
                return True
            time.sleep(0.05)
        return False


def started(folder, *overrides: str, group: bool = False, **environment: str) -> Running:
    """`python serve.py` with overrides, once it is healthy; group: in a group of its own."""
    port, log = free_port(), folder / "serve.log"
    command = [sys.executable, str(ROOT / "serve.py"), f"port={port}", f"output_dir={folder}"]
    given = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"} | environment
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *overrides],
            cwd=ROOT,
            env=given,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=group,
        )
    running, deadline = Running(process, f"http://127.0.0.1:{port}", log), time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{running.url}/health", timeout=5).status_code == 200:
                return running
        except httpx.HTTPError:
            time.sleep(0.2)
    ended(running)
    raise AssertionError(log.read_text())


def ended(running: Running) -> None:
    """End a server, and see that it does."""
    running.process.send_signal(signal.SIGTERM)
    try:
        running.process.wait(60)
    except subprocess.TimeoutExpired:
        running.process.kill()
        raise


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("serve")
    given = "server.adaptive=false", "server.max_running=8", f"server.max_waiting={PLACES - 8}"
    running = started(folder, "threads=1", "server.prefill_rows=64", *given)
    yield running
    ended(running)
