"""A load test on this machine: the server, the same one with plain decoding, `transformers serve`.

    python -m tools.load --clients 1 2 4 8 16 --seconds 20
    python -m tools.load --overload 10

Clients are locust's: each waits for its answer before it asks again. The servers stay up together
and take turns, round after round, so that whatever else slows the machine slows all alike; what is
printed are medians over rounds. With --overload, more clients than the server has places ask for so
many minutes, while its memory is watched.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import urlopen

import psutil

from slipstream.assets import locate

ROOT, SMALL = Path(__file__).parents[2], "slipstream/small-target"
MOST_CLIENTS, MOST_SECONDS, MOST_MINUTES = 256, 120, 30
"""What is asked of this machine at most."""


def main() -> None:
    given = arguments()
    servers = {"slipstream": [], "plain": ["budget=1"], "transformers": None}
    chosen = ["slipstream"] if given.overload else given.servers
    with ExitStack() as stack:
        made = {name: stack.enter_context(serving(name, servers[name])) for name in chosen}
        if given.overload:
            overload(*made["slipstream"], given)
            return
        for own in made.values():  # the first requests of each shape are slower
            load(own[1], 4, 3, given.tokens, own[2])
        print("clients | server | tokens/s | answers/s | p50, s | p95, s")
        for clients in given.clients:
            found: dict[str, list] = {name: [] for name in made}
            for _ in range(given.rounds):
                for name, (_, url, model) in made.items():
                    seen = load(url, clients, given.seconds, given.tokens, model)
                    found[name].append(rates(seen))
            for name, rounds in found.items():
                own = [statistics.median(each) for each in zip(*rounds, strict=True)]
                numbers = " | ".join(f"{number:.3g}" for number in own)
                print(f"{clients} | {name} | {numbers}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["slipstream", "plain", "transformers"]
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=int, default=15, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="max_tokens of a request")
    parser.add_argument("--servers", nargs="+", choices=names, default=names)
    parser.add_argument("--overload", type=float, default=0, help="minutes of it, instead")
    given = parser.parse_args()
    large = max(given.clients) > MOST_CLIENTS or given.seconds > MOST_SECONDS
    if large or given.overload > MOST_MINUTES:
        most = f"{MOST_CLIENTS} clients, {MOST_SECONDS} seconds, {MOST_MINUTES} minutes"
        parser.error(f"at most {most}")
    return given


@contextmanager
def serving(name: str, overrides: list[str] | None):
    """A server on a free port of the loopback interface: its process, its URL, its model's name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder, model = tempfile.mkdtemp(), "slipstream"
    if overrides is None:
        model = str(locate(SMALL))
        command = ["-m", "transformers.cli.transformers", "serve", model, "--dtype", "float32"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
    else:
        command = [str(ROOT / "serve.py"), f"port={port}", f"output_dir={folder}", *overrides]
    with open(f"{folder}/log", "w") as log:
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=log, stderr=log)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{name} did not start; see {folder}/log")
            time.sleep(0.5)
        yield process, url, model
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def healthy(url: str) -> bool:
    try:
        return urlopen(f"{url}/health", timeout=5).status == 200
    except OSError:
        return False


def load(url: str, clients: int, seconds: float, tokens: int, model: str) -> dict:
    """What locust saw of so many clients for so long."""
    command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py"))]
    command += ["--headless", "--json", "--only-summary", "--host", url, "--stop-timeout", "60"]
    command += ["-u", str(clients), "-r", str(clients), "-t", f"{seconds:g}s"]
    given = os.environ | {"LOAD_MODEL": model, "LOAD_TOKENS": str(tokens)}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
    found = json.loads(done.stdout)
    return found[0] | {"seen": done.stderr}


def rates(seen: dict) -> tuple[float, float, float, float]:
    """Tokens and answers a second, and the two percentiles of the seconds an answer takes."""
    if seen["num_failures"]:
        sys.exit(f"{seen['num_failures']} requests failed: {seen['seen'][-2000:]}")
    seconds = seen["last_request_timestamp"] - seen["start_time"]
    times = sorted((float(time), count) for time, count in seen["response_times"].items())
    each = [time / 1000 for time, count in times for _ in range(count)]
    at = [each[min(len(each) - 1, int(share * len(each)))] for share in (0.5, 0.95)]
    return seen["total_content_length"] / seconds, len(each) / seconds, *at


def overload(process: subprocess.Popen, url: str, model: str, given: argparse.Namespace) -> None:
    """More clients than places, minute after minute."""
    whole, ends = psutil.Process(process.pid), time.monotonic() + 60 * given.overload
    while (left := ends - time.monotonic()) > 1:
        seen = load(url, 128, min(60, left), given.tokens, model)
        own = [whole, *whole.children(recursive=True)]
        memory = sum(each.memory_info().rss for each in own) / 2**20
        refused = seen["seen"].count("429") and seen["num_failures"]
        answered = seen["num_requests"] - seen["num_failures"]
        wrong = "wrong" in seen["seen"] or "without a sentence" in seen["seen"]
        said = "something else" if wrong else "all others answered"
        print(f"{memory:.0f} MiB, {answered} answers, {refused} refusals (429), {said}", flush=True)


if __name__ == "__main__":
    main()
