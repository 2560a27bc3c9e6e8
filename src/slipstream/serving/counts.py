"""What the engine counts, as Prometheus reads it: the names are those of vLLM's dashboards.

Workers are processes, so their counts stand in memory that they share with the server's process:
each worker writes its own after every step, and a scrape reads them all. Prometheus' own
multiprocess mode would do the same through files.
"""

import multiprocessing
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts that were read."),
    "generation_tokens": ("generation_tokens", "Tokens of answers."),
    "drafts": ("spec_decode_num_drafts", "Draft trees that were verified."),
    "draft_tokens": (
        "spec_decode_num_draft_tokens",
        "Nodes of these trees, roots left out and padding to the widest tree of a step included.",
    ),
    "accepted": ("spec_decode_num_accepted_tokens", "Drafted tokens that were right."),
}
"""What only grows; its name and explanation in Prometheus."""
REASONS = ("stop", "length", "abort", "error")
POSITIONS = 32
"""Positions of drafted tokens that are counted apart; deeper ones count for the last."""
COUNTED = "positions", "received", "running", *COUNTERS, *REASONS, *range(POSITIONS)
CELLS = {name: place for place, name in enumerate(COUNTED)}


class Counts:
    """The counts of one worker by name, over `cells`, integers of which it is the only writer; 0,
    1, 2 and so on are accepted tokens by their position in the draft; received: jobs that were
    taken from the queue; positions: of the target's context."""

    def __init__(self, cells: MutableSequence[int] | None = None):
        self.cells = [0] * len(CELLS) if cells is None else cells

    def __getitem__(self, name: str | int) -> int:
        return self.cells[CELLS[name]]

    def __setitem__(self, name: str | int, value: int) -> None:
        self.cells[CELLS[name]] = value

    def verified(self, nodes: int, accepted: int) -> None:
        """A draft of so many nodes, the root left out, had so many right on its path."""
        self["drafts"] += 1
        self["draft_tokens"] += nodes
        self["accepted"] += accepted
        for position in range(accepted):
            self[min(position, POSITIONS - 1)] += 1


class Board:
    """Places for open requests, and the counts of `workers`, in memory that processes share. One
    process alone takes a place for each request and frees it, with the last word or when the client
    goes. A ticket in it says whose it is: workers drop a request that does not own its place."""

    def __init__(self, places: int, workers: int):
        memory = multiprocessing.get_context("spawn")
        self.owners = memory.RawArray("Q", places)
        self.cells = [memory.RawArray("Q", len(CELLS)) for _ in range(workers)]
        self.sentence = memory.RawArray("c", 4096)
        self.tickets = 0

    @property
    def said(self) -> str:
        """Why no worker answers any more; "" as long as they do."""
        return self.sentence.value.decode(errors="ignore")

    def say(self, sentence: str) -> None:
        self.sentence.value = sentence.encode()[:4000]

    def take(self, count: int) -> list[tuple[int, int]] | None:
        """A place and a ticket for each of so many requests; None where they are not free."""
        free = [place for place, owner in enumerate(self.owners) if not owner][:count]
        if len(free) < count:
            return None
        taken = []
        for place in free:
            self.tickets += 1
            self.owners[place] = self.tickets
            taken.append((place, self.tickets))
        return taken

    def free(self, place: int, ticket: int) -> None:
        """Free a place if `ticket` owns it; a second call changes nothing."""
        if self.owners[place] == ticket:
            self.owners[place] = 0

    @property
    def open(self) -> int:
        """Requests that wait or are being answered."""
        return sum(owner > 0 for owner in self.owners)


@dataclass(frozen=True)
class Exposed:
    """The counts of all workers as metrics, for `prometheus_client.generate_latest`. open_now: how
    many requests there are, waiting or not."""

    model: str
    counts: Sequence[Counts]
    open_now: int

    def collect(self) -> Iterator[Metric]:
        def family(kind, name: str, text: str, values: dict, *labels: str) -> Metric:
            found = kind(f"vllm:{name}", text, labels=["model_name", *labels])
            for given, value in values.items():
                found.add_metric([self.model, *given], value)
            return found

        total = {name: sum(each[name] for each in self.counts) for name in CELLS}
        text, running = "Requests that are being answered.", total["running"]
        yield family(GaugeMetricFamily, "num_requests_running", text, {(): running})
        values = {(): max(0, self.open_now - running)}
        yield family(GaugeMetricFamily, "num_requests_waiting", "Requests that wait.", values)
        for own, (name, text) in COUNTERS.items():
            yield family(CounterMetricFamily, name, text, {(): total[own]})
        text = "Drafted tokens that were right, by position in the draft."
        name = "spec_decode_num_accepted_tokens_per_pos"
        values = {(str(each),): total[each] for each in range(POSITIONS) if total[each]}
        yield family(CounterMetricFamily, name, text, values, "position")
        text = "Requests that ended, by reason; abort: the client had gone; error: a step failed."
        values = {(reason,): total[reason] for reason in REASONS}
        yield family(CounterMetricFamily, "request_success", text, values, "finished_reason")
