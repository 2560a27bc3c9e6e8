"""Answers of an OpenAI-compatible server: the same model behind an engine on any machines.

Tokens come back, or, from servers that tell none, texts, which the target's tokenizer splits again.
It knows no target and no files.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import requests
from requests.adapters import HTTPAdapter, Retry

from slipstream.core.errors import InputError, first_sentence
from slipstream.core.processes import launched
from slipstream.data.answers import NOTHING, Answered, Answerer, Question
from slipstream.data.rendering import render_sample, text_ids
from slipstream.decoding.answer import special_tokens

log = logging.getLogger(__name__)
FIELD = "data.regeneration.endpoint"
# At once, then after 2, 4, 8 seconds and so on, four minutes in all, whatever the server says (some
# say a second, and some an hour): where it is busy, restarts, or fails.
RETRIES = Retry(
    total=9,
    read=1,
    backoff_factor=1,
    backoff_max=60,
    status_forcelist=(408, 429, 500, 502, 503, 504),
    allowed_methods=None,
    respect_retry_after_header=False,
    raise_on_status=False,
)
TIMEOUT = 10, 1800
"""Seconds for a connection, and for a whole answer of a busy server."""
WHOLE_DISTRIBUTION = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
"""Asked for, since servers take what is not given from the model's own generation config."""
REFUSED = 400, 413, 422
"""Of these statuses the server's own words say what was wrong with a prompt, and hold no key."""


class _RefusedError(InputError):
    """The server takes no such prompt."""


@dataclass
class Endpoint(Answerer):
    """The model that the server at `url` ('http://host:port/v1') calls `model`, `concurrency`
    prompts at a time, of all processes together. key_variable: the environment variable that holds
    the key, None for no key.

    The server is given the tokens of the prompt, so that it reads what the target would, whatever
    chat template it has itself.
    """

    url: str
    model: str
    concurrency: int
    key_variable: str | None
    tokenizer: Any
    vocab_size: int
    max_new_tokens: int
    max_positions: int

    def portions(self, questions: Sequence[Question]) -> list[list[int]]:
        return [[number] for number in range(len(questions))]

    def answer(
        self, questions: Sequence[Question], portions: list[list[int]], done: Callable[[int], None]
    ) -> Iterator[dict[int, Answered]]:
        pool = ThreadPoolExecutor(max(1, self.concurrency // launched()[1]))
        with self._session() as session:
            try:
                asked = {
                    pool.submit(self._ask, session, questions[number]): number
                    for (number,) in portions
                }
                errors, refused = [], 0
                for future in as_completed(asked):
                    if future.cancelled():
                        continue
                    error = future.exception()
                    if isinstance(error, _RefusedError):  # of this prompt alone, perhaps
                        self.refusal = error
                        refused += 1
                        yield {asked[future]: NOTHING}
                    elif error:
                        errors.append(error)
                        for other in asked:  # what was asked already is waited for, and kept
                            other.cancel()
                        continue
                    else:
                        yield {asked[future]: future.result()}
                    done(1)
                if refused:
                    log.warning("left out %d prompts: %s", refused, self.refusal)
                if errors:
                    raise errors[0]
            finally:
                pool.shutdown(cancel_futures=True)

    def _session(self) -> requests.Session:
        session = requests.Session()
        for scheme in ("http://", "https://"):
            adapter = HTTPAdapter(pool_maxsize=self.concurrency, max_retries=RETRIES)
            session.mount(scheme, adapter)
        if self.key_variable is not None:
            key = os.environ.get(self.key_variable)
            if not key:
                raise InputError(
                    f"data.regeneration.key_variable: the environment has no {self.key_variable}; "
                    "export the key under that name, or give null for a server that asks for none"
                )
            session.headers["Authorization"] = f"Bearer {key}"
        return session

    def _ask(self, session: requests.Session, question: Question) -> Answered:
        body = {
            "model": self.model,
            "prompt": question.ids,
            "max_tokens": min(self.max_new_tokens, self.max_positions - len(question.ids)),
            "temperature": question.temperature,
            "seed": question.seed,
            "return_token_ids": True,
        } | WHOLE_DISTRIBUTION
        url = f"{self.url.rstrip('/')}/completions"
        try:
            response = session.post(url, json=body, timeout=TIMEOUT)
            response.raise_for_status()
            choice = response.json()["choices"][0]
            text, ids = choice["text"] or "", choice.get("token_ids")
        except requests.HTTPError as error:
            status, said = error.response.status_code, error.response.text[:300].strip()
            told = f" ({first_sentence(ValueError(said))})" if said and status in REFUSED else ""
            raise (_RefusedError if status in REFUSED else InputError)(
                f"{FIELD}: {url} answered a prompt of {len(question.ids)} tokens with status "
                f"{status}{told}; check model, key, the context it has (data.max_length) and its "
                "own log (it must take prompts as tokens), and start again: answers so far are kept"
            ) from None
        except (requests.RequestException, KeyError, IndexError, TypeError) as error:
            raise InputError(
                f"{FIELD}: {url} gave no answer ({type(error).__name__}); check that an "
                "OpenAI-compatible server runs there, and start again: answers so far are kept"
            ) from None
        ended = choice.get("finish_reason") == "stop"  # else cut, by the limit or on the way
        if not isinstance(ids, list) or not all(token in range(self.vocab_size) for token in ids):
            ids = text_ids(self.tokenizer, text)  # of a server that tells no tokens
        there = ids[-1:] and ids[-1] in special_tokens(self.tokenizer).values()
        return Answered(ids + (self.end if ended and not there else []), ended)

    @cached_property
    def end(self) -> list[int]:
        """What ends an answer: with a chat template the first special token that it has after one,
        which need not be the tokenizer's own."""
        tokenizer, usual = self.tokenizer, self.tokenizer.eos_token_id
        if tokenizer.chat_template is not None:
            with suppress(InputError):  # templates that render answers otherwise
                sample = render_sample(tokenizer, "a", "a")
                after = sample.ids[sample.prompt_length :]
                special = {*special_tokens(tokenizer).values()} - {tokenizer.unk_token_id}
                usual = next((token for token in after if token in special), usual)
        return [] if usual is None else [usual]
