"""The requests of one batch: their answers in the making.

Every request has its own limits, sampling and uniform numbers; on the device all choose together.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from slipstream.core.cache import StepCache
from slipstream.core.errors import InputError
from slipstream.core.transfer import on_device
from slipstream.core.trees import Trees
from slipstream.core.verification import NOT_FINITE
from slipstream.decoding.answer import Answer, Generation, Run
from slipstream.decoding.statistics import Clock, Statistics
from slipstream.drafters.base import Request, Session, Verified
from slipstream.targets.rows import Rows

T = TypeVar("T")


@dataclass(eq=False)
class Answering(Request):
    """A request with its answer so far.

    accepted: drafted tokens that each forward of the target kept; rows: that these worked on;
    seconds, shares: of decoding, its part of each step; runs: of SPRINTER.
    """

    answer: Answer
    accepted: list[int] = field(default_factory=list)
    rows: int = 0
    seconds: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    _numbers: torch.Tensor | None = None

    @property
    def finished(self) -> bool:
        return self.answer.finished is not None

    @property
    def failed(self) -> bool:
        """Whether the target decided no token for it."""
        return self.answer.finished == "failed"

    def numbers_on(self, device: torch.device) -> torch.Tensor:
        """(answer.room, 1 + siblings): for each place the uniform number that decides, and those
        that keep drawn children; brought to `device` once."""
        if self._numbers is None:
            both = torch.cat([self.chance.decide[:, None], self.chance.keep], 1)
            self._numbers = on_device(both[: self.answer.room], device)
        return self._numbers

    def decide(self, tokens: list[int]) -> None:
        """Accepted tokens of a draft, and the target's own one after them."""
        for token in tokens[:-1]:
            self.emit(token, drafted=True)
        self.emit(tokens[-1], drafted=False)
        if self.finished:
            self.room = 0

    def emit(self, token: int, drafted: bool) -> None:
        """The answer goes on with this token; `InputError` where the target decides none, and the
        request has failed."""
        if token == NOT_FINITE:
            self.answer.finished = "failed"
            raise InputError(
                "target: its logits are NaN or infinite; compute in another target.dtype (float16 "
                "overflows), or copy its files again"
            )
        super().decide([token])
        self.answer.emit(token, drafted)

    def count(self, rows: int, accepted: int) -> None:
        """The target worked on so many rows of this request in one forward."""
        self.rows += rows
        self.accepted.append(accepted)

    def generation(self) -> Generation:
        """What was generated so far; 'length' where it was left unfinished."""
        answer, accepted, shares = self.answer, tuple(self.accepted), dict(self.shares)
        counts, worked = (1, len(answer.ids), len(accepted)), (self.rows, answer.drafted)
        took = Statistics(*counts, self.seconds, shares, *worked)
        said = answer.ids, answer.text(), answer.finished or "length"
        return Generation(*said, took, tuple(self.runs), accepted)


class Batch:
    """Requests that are answered together.

    cache: of the target; trees: the next drafts, None before the prompts have run; drafted: how
    many nodes those have that are verified, without the padding of compiled steps; session: what
    drafts them; ahead: of a forward that has begun, its trees, behind how many slots its rows are
    staged, and what it finds; None for none. samplings: of each request, or one that all have;
    room: (B,) on the device, how many more tokens each answer may have.
    """

    def __init__(self, requests: Sequence[Answering], cache: StepCache, session: Session):
        self.cache, self.session, self.clock = cache, session, Clock()
        self.trees: Trees | None = None
        self.drafted = 0
        self.ahead: tuple[Trees, int, object] | None = None
        self._take(list(requests))

    def _take(self, requests: list[Answering]) -> None:
        self.requests, device = requests, self.cache.ends.device
        self.room = on_device([request.room for request in requests], device)
        samplings = tuple(request.sampling for request in requests)
        self.samplings = samplings[:1] if len(set(samplings)) == 1 else samplings
        self.greedy = all(sampling.greedy for sampling in self.samplings)
        if not self.greedy:
            self.sizes = on_device([request.answer.room for request in requests], device)
            numbers = [request.numbers_on(device) for request in requests]
            self.decide, *self.keep = pad_sequence(numbers, batch_first=True).unbind(-1)

    def begin(self, forward: Callable[["Batch"], T]) -> None:
        """Begin the next forward while the host learns what was decided: in vain if that ends the
        answer."""
        slots, found = self.cache.slots, forward(self)
        self.ahead = self.trees, slots, found

    def go_on(self, forward: Callable[["Batch"], T]) -> T:
        """What the forward that has begun finds; a new one if there is none, or requests have
        joined, or the cache counts other slots."""
        (trees, slots, found), self.ahead = self.ahead or (None, 0, None), None
        begun = trees is self.trees and slots == self.cache.slots
        return found if begun else forward(self)

    def points(self, numbers: torch.Tensor, count: int) -> torch.Tensor:
        """(B, count) of the uniform numbers, those of the next places of each answer."""
        places = (self.sizes - self.room)[:, None] + torch.arange(count, device=numbers.device)
        return numbers.gather(1, places.clamp(max=numbers.shape[1] - 1))

    def deciding(self, count: int) -> tuple[torch.Tensor, ...]:
        """The uniform numbers of the next places, for `choose`; none where all are greedy."""
        return () if self.greedy else (self.points(self.decide, count),)

    def verified(self, share: str, trees: Trees, rows: Rows, logits, *found) -> Verified:
        """What was verified in a forward; share: of the time, into which the wait for it falls;
        found: from `paths` to `room`."""
        most_room = max(request.room for request in self.requests) - 1
        wait = partial(self.clock.share, share)
        return Verified(self.requests, self.cache, trees, rows, logits, *found, most_room, wait)

    def leave(self) -> None:
        """Let the finished requests go."""
        kept = [place for place, each in enumerate(self.requests) if not each.finished]
        if len(kept) == len(self.requests):
            return
        if kept:
            self.cache.keep_sequences(kept)
            self.session.keep(kept)
            self.trees = self.trees.only(kept)
        self._take([self.requests[place] for place in kept])

    def join(self, other: "Batch", cache: StepCache) -> None:
        """The requests of `other` go on with these; cache: with the sequences of both."""
        self.cache = cache
        self.session.join(other.session)
        self.trees = self.trees.join(other.trees)
        self._take(self.requests + other.requests)

    @contextmanager
    def charged(self) -> Iterator[None]:
        """The time within is divided among the requests."""
        requests, started, self.clock = self.requests, time.perf_counter(), Clock()
        yield
        seconds = (time.perf_counter() - started) / len(requests)
        for request in requests:
            request.seconds += seconds
            for name, spent in self.clock.seconds.items():
                request.shares[name] = request.shares.get(name, 0.0) + spent / len(requests)
