"""More clients than a server has places: a proof that nothing is lost or wrong, and that memory
does not grow."""

import argparse
import re
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import ceil
from urllib.request import urlopen

import psutil

from slipstream.results.record import Plot, Result, Rows
from tools.load.clients import Server, alone, load

CROWD = 128
"""Clients of an overload: more than a server of conf/serve.yaml has places."""
GROWTH = 1.05
"""Most that memory may grow after the second minute, as a factor."""
ENDS = "answer", "refused", "left", "wrong", "lost"


def overloaded(server: Server, given: argparse.Namespace) -> tuple[Result, str | None]:
    """Minute after minute of overload; with it, in a sentence, what must not be."""
    known, rows = alone(server, given), []
    for minute in range(1, 1 + ceil(given.overload)):
        with memory_of(server.process.pid) as taken:
            seen = load(server, CROWD, 60 * min(1, given.overload), given, minute, known)
        ends = {end: seen.ends.get(end, 0) for end in ENDS}
        ends["lost"] += seen.started - sum(seen.ends.values())
        p95 = seen.times[len(seen.times) * 95 // 100]
        rows.append({"minute": minute, "MiB": statistics.median(taken), "p95, s": p95} | ends)
        print(rows[-1], flush=True)
    plot = Plot("minute", ("MiB", ("answer", "refused")))
    return Result("Overload", rows, (plot,)), failure(rows, left_open(server.url))


def failure(rows: Rows, still_open: float) -> str | None:
    """What an overload must not show, in a sentence; still_open: requests after its end."""
    for end in ("wrong", "lost"):
        if count := sum(row[end] for row in rows):
            return f"{count} answers are {end}; see the log of the server"
    first, last = rows[min(1, len(rows) - 1)]["MiB"], rows[-1]["MiB"]
    if last > GROWTH * first:
        return f"memory has grown from {first:.0f} to {last:.0f} MiB; look for what is kept"
    if still_open:
        return f"{still_open:.0f} requests are still open after the last client has gone"
    return None


def left_open(url: str) -> float:
    """The requests that are open according to /metrics, after up to ten seconds of waiting."""
    for _ in range(40):
        text = urlopen(f"{url}/metrics", timeout=10).read().decode()
        numbers = re.findall(r"^vllm:num_requests_\w+\{.*\} (\S+)$", text, re.M)
        if not (found := sum(map(float, numbers))):
            break
        time.sleep(0.25)
    return found


@contextmanager
def memory_of(process: int) -> Iterator[list[float]]:
    """Within, the MiB of all processes of a server, taken every second."""
    server, taken, over = psutil.Process(process), [], threading.Event()

    def take() -> None:
        while not over.wait(min(1, len(taken))):
            whole = [server, *server.children(recursive=True)]
            with suppress(psutil.NoSuchProcess):
                taken.append(sum(own.memory_full_info().pss for own in whole) / 2**20)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield taken
    finally:
        over.set()
        thread.join()
