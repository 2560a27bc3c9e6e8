"""What one client does: ask, wait for the whole answer, ask again. Locust runs it in processes of
its own, since it changes Python's networking for all that import it."""

import os
import random
from itertools import count

from locust import HttpUser, task

from slipstream.data.rows import read_rows

MODEL, TOKENS = os.environ["LOAD_MODEL"], int(os.environ["LOAD_TOKENS"])
ROUND, CLIENTS = os.environ["LOAD_ROUND"], count()
FOLDERS = os.environ["LOAD_DATA"].split(os.pathsep)
TEXTS = [row.prompt for folder in FOLDERS for row in read_rows(folder, "validation", False)[:40]]
KNOWN: dict[str, str] = {}
"""The first answer to each prompt: greedy ones are always the same in float32."""


class Client(HttpUser):
    """Greedy answers to the prompts, in an order that only the round and the client's
    number decide: every server is asked the same."""

    def on_start(self) -> None:
        self.order = random.Random(f"{ROUND} {next(CLIENTS)}")

    @task
    def ask(self) -> None:
        text = self.order.choice(TEXTS)
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": TOKENS,
            "temperature": 0,
        }
        path = "/v1/chat/completions"
        with self.client.post(path, json=body, catch_response=True, timeout=300) as response:
            meta = response.request_meta
            meta["name"], tokens = ended(response, text)
            # what locust sums up as the length of contents
            meta["response_length"] = tokens
            response.success()


def ended(response, text: str) -> tuple[str, int]:
    """How a request ended, which is the name that locust counts it under: answer, refused (by the
    sentence that says so), wrong, or lost; and the tokens of its answer."""
    if response.status_code == 429 and "waiting" in response.json()["error"]["message"]:
        return "refused", 0
    if response.status_code != 200:
        return "lost", 0
    found = response.json()
    answer = found["choices"][0]["message"]["content"]
    right = "LOAD_TIES" in os.environ or KNOWN.setdefault(text, answer) == answer
    return "answer" if right else "wrong", found["usage"]["completion_tokens"]
