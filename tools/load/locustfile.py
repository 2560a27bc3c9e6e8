"""What one client does: ask, wait for the whole answer, ask again. Locust runs it in processes of
its own, since it changes Python's networking for all that import it."""

import json
import os
import random
import time
from collections import Counter
from itertools import count
from pathlib import Path

from gevent import GreenletExit
from locust import HttpUser, constant_throughput, events, task

from tools.load.clients import body

GIVEN = json.loads(Path(os.environ["LOAD"]).read_text())
"""What clients.py: `load` says."""
CLIENTS, TALLY, PROVING = count(), Counter(), GIVEN["known"] is not None
BEGUN: list[float] = []
"""When requests were started, in seconds of the clock."""
KNOWN: dict[str, str] = GIVEN["known"] or {}
"""The right answer to each prompt, or the first one: greedy ones are always the same in float32."""
SECONDS = 60 if PROVING else 300
"""Without an answer, after which a request counts as lost."""


@events.quit.add_listener
def tell(**_) -> None:
    """How many requests were started, of which locust counts only those that ended, and when the
    first was, which locust takes for the moment of the first answer."""
    Path(GIVEN["started"]).write_text(json.dumps([TALLY["started"], min(BEGUN, default=0)]))


class Client(HttpUser):
    """Greedy answers to the prompts, in an order that only the round and the client's
    number decide: every server is asked the same."""

    if GIVEN["rate"]:
        wait_time = constant_throughput(GIVEN["rate"])

    def on_start(self) -> None:
        number = next(CLIENTS)
        self.order = random.Random(f"{GIVEN['turn']} {number}")
        self.leaving = PROVING and number % 10 == 9

    @task
    def ask_once(self) -> None:
        TALLY["started"] += 1
        BEGUN.append(time.time())
        try:
            self.ask()
        except GreenletExit:  # at the end locust stops those that wait, some as they go on
            TALLY["started"] -= 1
            raise

    def ask(self) -> None:
        text = self.order.choice(GIVEN["texts"])
        asked = body(GIVEN["model"], text, GIVEN["tokens"])
        seconds = self.order.uniform(0.05, 3) if self.leaving else SECONDS
        path = "/v1/chat/completions"
        with self.client.post(path, json=asked, catch_response=True, timeout=seconds) as response:
            meta = response.request_meta
            meta["name"], tokens = ended(response, text, self.leaving)
            # what locust sums up as the length of contents
            meta["response_length"] = tokens
            response.success()


def ended(response, text: str, leaving: bool) -> tuple[str, int]:
    """How a request ended, which is the name that locust counts it under: answer, refused (by the
    sentence that says so), left (the client hung up), wrong, or lost; and its answer's tokens."""
    if response.status_code == 429 and "waiting" in response.json()["error"]["message"]:
        return "refused", 0
    if response.status_code != 200:
        return "left" if leaving and response.status_code == 0 else "lost", 0
    found = response.json()
    answer = found["choices"][0]["message"]["content"]
    right = GIVEN["ties"] or KNOWN.setdefault(text, answer) == answer
    return "answer" if right else "wrong", found["usage"]["completion_tokens"]
