"""At every step the drafter whose draft promises most for its time, or none: chosen online, as
docs/drafters.md tells (Choice). What is known of drafts is `experience.py`'s business.

Of all there is to draft, what gives most tokens beyond those that decoding would have given in the
same time, at its pace so far. (Most tokens a second of the step alone would be wrong: where a cheap
draft is right now and then, slow steps between two such places cost more than they seem to.)

Where steps are compiled, the best working drafter drafts before the host knows what was decided:
the device is busy meanwhile, and where no lookup pays nothing waits for the host.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import log2
from typing import NamedTuple

from slipstream.core.drafts import Draft
from slipstream.core.errors import InputError
from slipstream.core.trees import Trees
from slipstream.drafters.base import HostSession, Request, Verified
from slipstream.drafters.draft_model import AttachedDraftModel
from slipstream.drafters.experience import CLAIMS, NEAR, NONE, PACE, TREES, Experience
from slipstream.drafters.several import AttachedSeveral, Several, SeveralSession
from slipstream.targets.target import Target


class Auto(Several):
    """Chooses among `drafters`, by name, and drafting nothing, at every step."""

    def attach(self, target: Target) -> AttachedSeveral:
        if target.num_parallel > 1:
            raise InputError(
                "drafter: auto chooses by the clock of each process, and all must verify as many "
                "rows; name one drafter in place of auto with target.tensor_parallel"
            )
        target, parts = self.attached_parts(target)
        for name, part in parts.items():
            if name in (NONE, NEAR):
                raise InputError(f"drafter.drafters.{name}: has a meaning here; give another name")
            if isinstance(part, AttachedDraftModel):
                raise InputError(
                    f"drafter.drafters.{name}: a draft model must read along at every step, "
                    "whoever drafts; leave it out"
                )
        return AttachedSeveral(target, parts, Experience, AutoSession)


class AutoSession(SeveralSession):
    """near: sessions whose drafts cost no forward; working: the others; episodes: of each request
    what drafts have been worth in it, watched: and its drafts whose worth is not known yet;
    paying: near drafters whose drafts are worth a look at every step; looking: those that draft for
    the next step; begins: whether working drafters draft before near ones look; running: the trees
    that are verified next; since: when the host knew what was decided last; spent: seconds of near
    drafters on the host since then."""

    def __init__(self, attached: AttachedSeveral, requests: Sequence[Request], budget: int):
        super().__init__(attached, requests, budget)
        self.near = {n: each for n, each in self.sessions.items() if isinstance(each, HostSession)}
        self.working = {n: each for n, each in self.sessions.items() if n not in self.near}
        self.episodes = attached.record.opened(request.tokens for request in requests)
        self.watched: list[list[Watched]] = [[] for _ in requests]
        self.paying, self.looking = self._paying(), []
        # Rules for the draft length look at what became of each of their drafts.
        ruled = any(attached.parts[name].length for name in self.working)
        self.begins = attached.target.compiled is not None and not ruled
        self.running: Running | None = None
        self.since, self.spent = 0.0, {}

    def ask(self, verified: Verified) -> None:
        glance = not verified.prompt and self.attached.record.glances
        self.looking = list(self.near) if glance else self.paying
        for session in self.working.values():
            session.ask(verified)
        for name in self.looking:
            with self._timed(name):
                self.near[name].ask(verified)

    def draft(self, verified: Verified, budget: int) -> Trees:
        record, begun, trees = self.attached.record, None, None
        verified.when_known(partial(self._learn, self.running))
        if self.begins:
            name, width, _ = record.choice(self.episodes, {}, self.working, budget)
            if name != NONE or not self.looking:
                begun, trees = (name, width), self._worked(name, width, verified)
        if self.looking or not begun:
            verified.host()
            drafts = self._looked(verified, budget)
            name, width, near = record.choice(self.episodes, drafts, self.working, budget, begun)
            if drafts:
                self.paying = self._paying()
            if not begun:
                trees = self._worked(name, width, verified)
            if name == NEAR:
                device = verified.next_tokens.device
                trees = Trees.of([draft.first(width) for draft in near], device)
        worker = begun[0] if begun else name if name in self.working else NONE
        self.running = Running(name, width, worker, begun is not None)
        return trees

    def _worked(self, name: str, width: int, verified: Verified) -> Trees:
        """Trees of the working drafter `name`; roots alone if it is none."""
        trees = None
        for other, session in self.working.items():
            found = session.draft(verified, width if other == name else 1)
            trees = found if trees is None or other == name else trees
        return Trees.roots(verified.next_tokens) if trees is None else trees

    def _looked(self, verified: Verified, budget: int) -> dict[str, list[Draft]]:
        """The drafts of near drafters, by name, of each request."""
        drafts = {}
        for name in self.looking:
            with self._timed(name):
                own = drafts[name] = self.near[name].drafts(verified, budget)
            for watched, request, draft in zip(self.watched, verified.requests, own, strict=True):
                if len(draft) > 1:
                    start = len(request.tokens)
                    watched.append(Watched(name, draft, start, start + max(draft.depths())))
        return drafts

    def _paying(self) -> list[str]:
        """Near drafters for every step: those that pay, or keep what they learn between prompts."""
        pays, near = self.attached.record.pays, self.near.items()
        return [name for name, each in near if each.attached.keeps or pays(name, self.episodes)]

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """A drafter works on the host: no step costs more for it, whoever drafts."""
        started = time.perf_counter()
        yield
        self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - started

    def _learn(self, trees: "Running | None", verified: Verified) -> None:
        """Take up what became of these trees, and of all drafts whose worth is known now."""
        record, decided, now = self.attached.record, verified.host(), time.perf_counter()
        if trees is not None:
            name, width, seconds = trees.name, trees.width, now - self.since
            beside = 0.0 if trees.begun else sum(self.spent.values())
            record.spent(self.spent)
            record.passed(trees.worker, len(decided) * width, seconds - beside)
            for episode, tokens in zip(self.episodes, decided, strict=True):
                episode.add(PACE, NEAR if name == NEAR else "", len(tokens), seconds)
                if name in self.working:
                    episode.add(TREES, name, log2(width), len(tokens) - 1)
        self.since = now
        self.spent = {}
        for place, request in enumerate(verified.requests):
            known = len(request.tokens)
            for name, draft, start, end in self.watched[place]:
                if end <= known:
                    right = draft.agreement(request.tokens[start:end])
                    self.episodes[place].add(CLAIMS, name, sum(draft.confidences[1:]), right)
            self.watched[place] = [each for each in self.watched[place] if each.end > known]

    def keep(self, indices: list[int]) -> None:
        self.watched = [self.watched[index] for index in indices]
        self.episodes = [self.episodes[index] for index in indices]
        self.paying = self._paying()
        super().keep(indices)

    def join(self, other: "AutoSession") -> None:
        self.watched += other.watched
        self.episodes += other.episodes
        self.paying = self._paying()
        super().join(other)
        self.running = None  # the trees are of both, and the time was shared with prompts


@dataclass
class Running:
    """Trees that are verified: who drafted them, and of how many nodes each; worker: the working
    drafter that drafted, too, if any; begun: whether it did so before near ones looked."""

    name: str
    width: int
    worker: str
    begun: bool


class Watched(NamedTuple):
    """A draft of a near drafter, made when its text had `start` tokens, and known at `end`."""

    name: str
    draft: Draft
    start: int
    end: int
