"""A load test on this machine: the server, the same one with plain decoding, `transformers serve`.

    python -m tools.load --clients 1 2 4 8 16 --seconds 15
    python -m tools.load --models runs/scale/400m --dtype bfloat16
    python -m tools.load --overload 10

Clients are locust's: each waits for its answer before it asks again. The servers stay up together
and take turns, round after round, so that whatever else slows the machine slows all alike. With
--overload, more clients than the server has places ask for so many minutes, and some hang up: exit
code 1 if an answer is wrong or lost, or memory grows. Writes results.json, table.md and plot.png.
"""

import argparse
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import urlopen

from slipstream.assets import locate
from slipstream.evaluation.metrics import ratio_interval
from slipstream.results.record import Plot, Result, Rows, environment
from slipstream.results.writer import show, write
from tools.load.clients import ROOT, Seen, Server, load
from tools.load.overload import overloaded

SMALL = "slipstream/small-"
SERVERS = {"slipstream": [], "plain": ["budget=1"], "transformers": None}
"""What is started under each name: overrides of serve.py, None for `transformers serve`."""
MOST_CLIENTS, MOST_SECONDS, MOST_MINUTES = 256, 120, 30
"""What is asked of this machine at most."""


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the servers, too
    given = arguments()
    chosen = ["slipstream"] if given.overload else given.servers
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(name, given)) for name in chosen}
        if given.overload:
            result, failure = overloaded(servers["slipstream"], given)
        else:
            result, failure = compared(servers, given), None
    show(result)
    write(Path(given.output), result, vars(given), environment())
    if failure:
        sys.exit(f"error: {failure}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=int, default=15, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="max_tokens of a request")
    parser.add_argument("--models", default=SMALL, help="what studies.enlargement wrote")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--data", nargs="+", help="folders with validation prompts of your own")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--overload", type=float, default=0, help="minutes of it, instead")
    parser.add_argument("--rate", type=float, default=0, help="requests a second of each client")
    parser.add_argument("--output", default="runs/load", help="folder of the results")
    given = parser.parse_args()
    large = max(given.clients) > MOST_CLIENTS or given.seconds > MOST_SECONDS
    if large or given.overload > MOST_MINUTES:
        most = f"{MOST_CLIENTS} clients, {MOST_SECONDS} seconds, {MOST_MINUTES} minutes"
        parser.error(f"at most {most}")
    return given


def compared(servers: dict[str, Server], given: argparse.Namespace) -> Result:
    """All servers under the same numbers of clients; ratios of tokens/s with 95 % intervals over
    rounds."""
    rows: Rows = []
    others = [name for name in ("plain", "transformers") if name in servers and len(servers) > 1]
    for clients in given.clients:
        rounds: dict[str, list[Seen]] = {name: [] for name in servers}
        for server in servers.values():  # the first requests of each batch size are slower
            load(server, clients, 3, given, 0)
        for turn in range(1, 1 + given.rounds):
            for name in list(servers)[:: 1 if turn % 2 else -1]:
                seen = load(servers[name], clients, given.seconds, given, turn)
                if set(seen.ends) != {"answer"}:
                    sys.exit(f"{name}: requests ended as {seen.ends}")
                rounds[name].append(seen)
        for name, own in rounds.items():
            rows.append({"clients": clients, "server": name} | rates(own))
            for other in others:
                found = (None, None, None)
                if other != name:
                    found = ratio_interval(*map(amounts, (own, rounds[other])))
                ends = (f"vs {other}", f"vs {other}, low", f"vs {other}, high")
                rows[-1] |= dict(zip(ends, found, strict=True))
            print({key: value for key, value in rows[-1].items() if value is not None}, flush=True)
    bounds = {"vs plain": ("vs plain, low", "vs plain, high")}
    beside = Plot("clients", ("vs plain",), "server", interval=bounds)
    speeds = Plot("clients", ("tokens/s", "p95, s"), "server")
    return Result("Load", rows, (speeds, beside) if "plain" in others else (speeds,))


def amounts(rounds: list[Seen]) -> tuple[list[float], list[float]]:
    """Tokens and seconds of each round."""
    return [own.tokens for own in rounds], [own.seconds for own in rounds]


def rates(rounds: list[Seen]) -> dict[str, float]:
    """Tokens and answers a second, and percentiles of the seconds of an answer: medians of rounds
    and of all answers."""
    times = sorted(time for own in rounds for time in own.times)
    return {
        "tokens/s": statistics.median(own.tokens / own.seconds for own in rounds),
        "answers/s": statistics.median(len(own.times) / own.seconds for own in rounds),
        **{f"p{at}, s": times[len(times) * at // 100] for at in (50, 95)},
    }


@contextmanager
def serving(name: str, given: argparse.Namespace) -> Iterator[Server]:
    """A server on a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    target, streams = (
        f"{given.models}{part}" if given.models == SMALL else f"{given.models}/{part}"
        for part in ("target", "streaming")
    )
    folder, model, overrides = tempfile.mkdtemp(), "slipstream", SERVERS[name]
    if overrides is None:
        model = str(locate(target))
        command = ["-m", "transformers.cli.transformers", "serve", model, "--dtype", given.dtype]
        command += ["--host", "127.0.0.1", "--port", str(port)]
    else:
        command = [str(ROOT / "serve.py"), f"port={port}", f"output_dir={folder}", *overrides]
        command += [f"target.name={target}", f"target.dtype={given.dtype}"]
        command += [f"speculator_path={streams}"]
    with open(f"{folder}/log", "w") as log:
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=log, stderr=log)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{name} did not start; see {folder}/log")
            time.sleep(0.5)
        yield Server(process, url, model)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    shutil.rmtree(folder)  # of a server that failed its log stays


def healthy(url: str) -> bool:
    try:
        return urlopen(f"{url}/health", timeout=5).status == 200
    except OSError:
        return False


if __name__ == "__main__":
    main()
