"""What one client does: ask, wait for the whole answer, ask again. Locust runs it in processes of
its own, since it changes Python's networking for all that import it."""

import os
import random

from locust import HttpUser, task

from slipstream.assets import PROMPTS
from slipstream.data.rows import read_rows

MODEL, TOKENS = os.environ["LOAD_MODEL"], int(os.environ["LOAD_TOKENS"])
TEXTS = [
    row.prompt
    for kind in ("data_to_text", "text_to_sql")
    for row in read_rows(PROMPTS / kind, "validation", False)[:40]
]
KNOWN: dict[str, str] = {}
"""The first answer to each prompt: greedy ones are always the same."""


class Client(HttpUser):
    """Greedy answers to the shipped prompts, in an order of its own."""

    @task
    def ask(self) -> None:
        text = random.choice(TEXTS)
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": TOKENS,
            "temperature": 0,
        }
        given = dict(name="answer", json=body, catch_response=True, timeout=300)
        with self.client.post("/v1/chat/completions", **given) as response:
            if response.status_code == 429:
                refused = "waiting" in response.json()["error"]["message"]
                response.failure("429" if refused else "429 without a sentence")
            elif response.status_code == 200:
                found = response.json()
                answer = found["choices"][0]["message"]["content"]
                if KNOWN.setdefault(text, answer) != answer:
                    response.failure("wrong")
                # what locust sums up as the length of contents: tokens
                response.request_meta["response_length"] = found["usage"]["completion_tokens"]
