"""Clients of a server, which locust runs in a process of its own (locustfile.py)."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

from slipstream.assets import PROMPTS
from slipstream.data.rows import read_rows

ROOT = Path(__file__).parents[2]
KINDS = "data_to_text", "text_to_sql"


class Server(NamedTuple):
    """process: of the command; model: its name in requests."""

    process: subprocess.Popen
    url: str
    model: str


class Seen(NamedTuple):
    """What clients saw in `seconds`: tokens of all answers, the seconds of each answer, ascending,
    how many requests ended in each way of locustfile.py, and how many were started."""

    seconds: float
    tokens: int
    times: list[float]
    ends: dict[str, int]
    started: int


def texts(given: argparse.Namespace) -> list[str]:
    """The prompts that clients ask."""
    folders = given.data or [PROMPTS / kind for kind in KINDS]
    return [row.prompt for each in folders for row in read_rows(each, "validation", False)[:40]]


def body(model: str, text: str, tokens: int) -> dict:
    """A greedy request."""
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}


def alone(server: Server, given: argparse.Namespace) -> dict[str, str]:
    """The answer to each prompt, asked one by one."""
    found = {}
    for text in texts(given):
        content = json.dumps(body(server.model, text, given.tokens)).encode()
        headers = {"Content-Type": "application/json"}
        asked = Request(f"{server.url}/v1/chat/completions", content, headers)
        with urlopen(asked, timeout=60) as response:
            found[text] = json.load(response)["choices"][0]["message"]["content"]
    return found


def load(
    server: Server,
    clients: int,
    seconds: float,
    given: argparse.Namespace,
    turn: int,
    known: dict[str, str] | None = None,
) -> Seen:
    """What so many clients saw for so long; turn: decides the order of prompts; known: the right
    answers, with which every tenth client hangs up early, again and again."""
    command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py"))]
    command += ["--headless", "--json", "--only-summary", "--host", server.url]
    command += ["--stop-timeout", "90", "-u", str(clients), "-r", str(clients)]
    with tempfile.TemporaryDirectory() as folder:
        settings, started = Path(folder) / "settings.json", Path(folder) / "started"
        # in bfloat16 what is decoded beside a request decides between tokens that are nearly tied
        told = {
            "model": server.model, "texts": texts(given), "tokens": given.tokens, "turn": turn,
            "rate": given.rate, "ties": given.dtype != "float32", "known": known,
            "started": str(started),
        }  # fmt: skip
        settings.write_text(json.dumps(told))
        done = subprocess.run(
            [*command, "-t", f"{max(1, round(seconds))}s"],
            cwd=ROOT, env=os.environ | {"LOAD": str(settings)}, capture_output=True, text=True,
        )  # fmt: skip
        found = {each["name"]: each for each in json.loads(done.stdout or "[]")}
        if "answer" not in found:
            sys.exit(f"nothing was answered: {done.stderr[-2000:]}")
        count, first = json.loads(started.read_text())
    answers = found["answer"]
    times = sorted((float(time), count) for time, count in answers["response_times"].items())
    return Seen(
        answers["last_request_timestamp"] - first,
        answers["total_content_length"],
        [time / 1000 for time, count in times for _ in range(count)],
        {name: each["num_requests"] for name, each in found.items()},
        count,
    )
