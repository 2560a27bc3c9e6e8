"""What plain and speculative decoding share: requests in, answers out.

Requests may join and leave between steps; `generate` and `generate_batch` are loops over steps. A
prompt runs in parts, so that no mask is quadratic in its length and that others may go on between
them; the last parts of a batch of prompts run together: one forward decides all first tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from threading import RLock

import torch

from slipstream.core.errors import enough_memory
from slipstream.core.sampling import Chance, Sampling, choose
from slipstream.core.transfer import on_device, right_padded
from slipstream.core.trees import Trees
from slipstream.core.verification import told
from slipstream.decoding.answer import Answer, Generation, Limits, TokenCallback
from slipstream.decoding.request import Answering, Batch
from slipstream.drafters.base import Session, Verified
from slipstream.targets.reading import PREFILL_ROWS, joined, read_on
from slipstream.targets.target import Target

_ONE_AT_A_TIME = RLock()
"""Threads that decode take turns, step by step: a target's config says meanwhile how it attends,
and graphs share their memory."""


class Decoder(ABC):
    """Decoding of `target`; subclasses say what a step is. sampling, limits: of requests that have
    none of their own; budget: most rows of a request that a step stages for its text."""

    exact = True

    def __init__(self, target: Target, sampling: Sampling, limits: Limits, budget: int = 1):
        self.target, self.sampling, self.limits = target, sampling, limits
        self.budget = budget
        self.running: Batch | None = None

    def generate(
        self, prompt_ids: list[int], seed: int = 0, callback: TokenCallback | None = None
    ) -> Generation:
        """Answer `prompt_ids`; raises `InputError` for a prompt beyond the target's context."""
        return self.generate_batch([prompt_ids], [seed], [callback])[0]

    @enough_memory(
        "batch_size", "lower it, give fewer prompts at a time, or a smaller limits.max_new_tokens"
    )
    def generate_batch(
        self,
        prompts: list[list[int]],
        seeds: list[int] | None = None,
        callbacks: Sequence[TokenCallback | None] | None = None,
    ) -> list[Generation]:
        """Answer several prompts together, each as it is answered alone (rounding apart).

        Their statistics are shares of the batch: seconds add up to those of the call.
        """
        if not prompts:
            return []
        self.limits.check_prompts(self.target, prompts)
        seeds = [0] * len(prompts) if seeds is None else seeds
        callbacks = [None] * len(prompts) if callbacks is None else callbacks
        requests = [self.request(*each) for each in zip(prompts, seeds, callbacks, strict=True)]
        batch = self._fresh(requests)
        for _ in self._prefill(batch, PREFILL_ROWS):
            pass
        while batch.requests:
            self._advance(batch)
        return [request.generation() for request in requests]

    def request(
        self,
        prompt_ids: list[int],
        seed: int = 0,
        callback: TokenCallback | None = None,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
    ) -> Answering:
        """A request for `start`; raises `InputError` for a prompt beyond the target's context."""
        limits = limits or self.limits
        (room,) = limits.check_prompts(self.target, [prompt_ids])
        answer = Answer(self.target, limits, room, callback)
        chance = Chance(seed, room)
        return Answering(list(prompt_ids), sampling or self.sampling, chance, room, answer)

    def start(self, requests: Sequence[Answering]) -> None:
        """Let these requests join those that are being answered; decides their first tokens."""
        for _ in self.starting(requests, PREFILL_ROWS):
            pass

    def starting(self, requests: Sequence[Answering], rows: int) -> Iterator[None]:
        """As `start`, in parts of up to `rows` tokens of each prompt: between two of them others
        may go on, start, or finish. Closed before its end, it lets the requests go."""
        fresh = self._fresh(requests)
        yield from self._prefill(fresh, rows)
        batch = self.running
        if not fresh.requests:
            return
        with torch.inference_mode():
            if batch is None:
                cache = joined(self.target, fresh.cache)
                if cache is not fresh.cache:  # a forward that has begun was staged in the other
                    fresh.cache, fresh.ahead = cache, None
            else:
                cache = joined(self.target, batch.cache, fresh.cache)
                self.running = None  # while the two batches are being joined
                batch.join(fresh, cache)
        self.running = batch or fresh

    def step(self) -> list[Answering]:
        """Decide at least one more token of every request; returns those that it finished."""
        if self.running is None:
            return []
        before = self.running.requests
        self._advance(self.running)
        if not self.running.requests:
            self.running = None
        return [request for request in before if request.finished]

    def finish(self, request: Answering) -> Generation:
        """The answer so far; a request that is not finished leaves."""
        if not request.finished:
            request.answer.finished = "length"
            self.running.leave()
            self.running = self.running if self.running.requests else None
        return request.generation()

    @torch.inference_mode()
    def _fresh(self, requests: Sequence[Answering]) -> Batch:
        """A batch of new requests whose prompts are still to be read."""
        longest = max(len(request.tokens) + request.room for request in requests)
        session = self._session(requests, longest)
        capacity = longest + self.budget + session.extra_rows
        return Batch(requests, self.target.new_cache(capacity, len(requests)), session)

    @torch.inference_mode()
    def _advance(self, batch: Batch) -> None:
        with _ONE_AT_A_TIME, batch.charged():
            self._step(batch)
        batch.leave()

    @torch.inference_mode()
    def _prefill(self, batch: Batch, rows: int) -> Iterator[None]:
        """Run the prompts in parts of up to `rows` tokens, and with the last ones decide the first
        token of each answer; answers that it ends leave."""
        prompts = [request.tokens for request in batch.requests]
        parts = -(-max(map(len, prompts)) // rows)
        for after in range(parts - 1, -1, -1):  # so many parts are still to come
            stops = [max(0, len(prompt) - after * rows) for prompt in prompts]
            pairs = zip(prompts, stops, strict=True)
            part = [prompt[max(0, stop - rows) : stop] for prompt, stop in pairs]
            with _ONE_AT_A_TIME, batch.charged(), batch.clock.share("prefill"):
                if after:
                    read = read_on(self.target, part, batch.cache, batch.session.visitors)
                    batch.session.read_part(read, list(map(len, part)))
                else:
                    self._first_tokens(batch, part)
            if after:
                yield
        batch.leave()

    def _first_tokens(self, batch: Batch, parts: list[list[int]]) -> None:
        """Run the last parts of the prompts, as chains whose last node is verified."""
        target, ids = self.target, right_padded(parts, self.target.device)
        last = on_device([len(own) - 1 for own in parts], target.device)
        rows = read_on(target, parts, batch.cache, batch.session.visitors, last)
        logits = target.logits(rows.hidden[torch.arange(len(last), device=last.device), last])
        tokens = choose(batch.samplings, logits[:, None], *batch.deciding(1))[:, 0]
        emitted = told(tokens, logits)
        parents = torch.arange(-1, ids.shape[1] - 1, device=last.device).expand_as(ids)
        parents = parents.masked_fill(parents >= last[:, None], -1)
        chains = Trees(ids, parents, torch.ones_like(ids, dtype=torch.float32), ids.shape[1] - 1)
        found = last[:, None], torch.ones_like(last), last, tokens, emitted[:, None], batch.room - 1
        self._decided(batch, batch.verified("prefill", chains, rows, None, *found))

    def _decided(self, batch: Batch, verified: Verified) -> None:
        """Tokens are decided and committed: prepare the next step, and tell the requests."""
        batch.room = verified.room
        with batch.clock.share("draft"):
            others = 0 if self.running in (None, batch) else len(self.running.requests)
            batch.session.ask(verified)
            verified.send()
            budget = self.allowed(len(batch.requests) + others)
            batch.trees = batch.session.draft(verified, budget)
        if len(batch.requests) + others == 1:
            self._begin_next(batch, verified)
        verified.host()

    def _begin_next(self, batch: Batch, verified: Verified) -> None:
        """Begin the next step of a request alone, before the host knows what was decided."""

    def _common(self, batch: Batch) -> tuple[Sampling, ...] | None:
        """The sampling that graphs of whole steps are captured for: () where all requests are
        greedy, this decoder's own; None for others, of which there may be any number."""
        samplings = () if batch.greedy else batch.samplings
        return samplings if samplings in ((), (self.sampling,)) else None

    def allowed(self, count: int) -> int:
        """Nodes of the next trees of `count` requests, up to `budget`."""
        return self.budget

    @abstractmethod
    def _session(self, requests: Sequence[Answering], longest: int) -> Session:
        """What drafts for new requests; longest: tokens of a prompt and its answer."""

    @abstractmethod
    def _step(self, batch: Batch) -> None:
        """At most one more forward of the target: decide at least one token of each request."""
