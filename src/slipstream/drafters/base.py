"""What proposes tokens, in three stages of its life: `Drafter`, `Attached` and `Session`. It never
changes what is emitted: verification is the engine's."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from slipstream.core.cache import StepCache
from slipstream.core.drafts import Draft
from slipstream.core.sampling import Chance, Sampling
from slipstream.core.settings import Settings
from slipstream.core.transfer import sent
from slipstream.core.trees import Trees
from slipstream.targets.rows import LayerVisitor, Rows
from slipstream.targets.target import Target


@dataclass(eq=False)
class Request:
    """One prompt that is being answered, as far as drafters may know it.

    tokens: prompt and answer so far; room: how many more tokens the answer may have.
    """

    tokens: list[int]
    sampling: Sampling
    chance: Chance
    room: int

    def decide(self, tokens: list[int]) -> None:
        """The answer goes on with these tokens."""
        self.tokens += tokens
        self.room -= len(tokens)


Brought = Callable[[], list[torch.Tensor]]
"""Tensors on their way to the host, where they are after the step's one wait."""


@dataclass
class Verified:
    """One verified forward of B requests, with the accepted rows committed; tensors on the device,
    which the host need not wait for.

    cache: the target's; trees: as verified (pruned nodes gone), of a prompt the chain of its last
    part's tokens, of which the last node alone is accepted; rows: of the forward, the nodes first,
    before the final norm; logits: (B, N, V) after the nodes, None for a prompt; paths: (B, P)
    accepted nodes, the root first, padded with any; counts: (B,) how many they are; last: (B,) the
    last of them; next_tokens: (B,) what follows, the roots of the next trees; decided: (B, P), the
    accepted tokens after the roots and the next ones, padded with -1; room: (B,) how many more
    tokens the answers may have, and at most `most_room`; wait: the context of the step's one wait.
    """

    requests: Sequence[Request]
    cache: StepCache
    trees: Trees
    rows: Rows
    logits: torch.Tensor | None
    paths: torch.Tensor
    counts: torch.Tensor
    last: torch.Tensor
    next_tokens: torch.Tensor
    decided: torch.Tensor
    room: torch.Tensor
    most_room: int
    wait: Callable[[], AbstractContextManager] = nullcontext
    _brought: list[torch.Tensor] = field(default_factory=list)
    _arriving: Brought | None = None
    _decided: list[list[int]] | None = None
    _waiting: list[Callable[["Verified"], None]] = field(default_factory=list)

    @property
    def prompt(self) -> bool:
        """Whether this was the prompt, and no draft yet."""
        return self.logits is None

    @property
    def each(self) -> torch.Tensor:
        """(B,) 0, 1, 2 and so on: with `last`, the place of the last accepted nodes."""
        return torch.arange(len(self.last), device=self.last.device)

    def bring(self, *tensors: torch.Tensor) -> Brought:
        """Let the step's one transfer, before it is sent, bring these to the host, too."""
        first, end = len(self._brought), len(self._brought) + len(tensors)
        self._brought += tensors

        def brought() -> list[torch.Tensor]:
            self.host()
            return self._brought[first:end]

        return brought

    def send(self) -> None:
        """Begin the step's one transfer, ahead of what the device is told to do after it."""
        self._arriving = sent(self.decided, *self._brought)

    @property
    def known(self) -> bool:
        """Whether the host has what was decided."""
        return self._decided is not None

    def when_known(self, call: Callable[["Verified"], None]) -> None:
        """Let this be called once the host has what was decided; nothing waits for that here."""
        self._waiting.append(call)

    def host(self) -> list[list[int]]:
        """The decided tokens of each request, which now knows them: the step's one wait."""
        if self._decided is None:
            if self._arriving is None:
                self.send()
            with self.wait():
                decided, *self._brought = self._arriving()
            self._decided = [[token for token in own if token != -1] for own in decided.tolist()]
            for request, own in zip(self.requests, self._decided, strict=True):
                request.decide(own)
            for call in self._waiting:
                call(self)
        return self._decided


class Session(ABC):
    """A drafter at work on one batch of requests: all drafting state, dropped with it.

    visitors: its part in the verifying forward; extra_rows: rows that it stages beyond the trees.
    """

    visitors: Sequence[LayerVisitor] = ()
    extra_rows: int = 0

    def ask(self, verified: Verified) -> None:
        """Name, with `verified.bring`, what the host needs in order to draft."""

    @abstractmethod
    def draft(self, verified: Verified, budget: int) -> Trees:
        """Trees of up to `budget` nodes from what was verified last, at first the prompts.

        Of the children of a node no two have the same token; parents stand before their children,
        what is worth most stands first, and no node is more confident than its parent. With a
        budget of 1 no draft is wanted: what was accepted is still to be taken up.
        """

    def read_part(self, rows: Rows, counts: list[int]) -> None:
        """Take up a part of the prompts that is not their last, which `draft` gets; counts: of the
        rows of each request how many are tokens, the others are padding."""

    def keep(self, indices: list[int]) -> None:
        """Only these requests go on (ascending)."""

    def join(self, other: "Session") -> None:
        """The requests of `other`, a session of the same drafter, go on after these."""


class Attached(ABC):
    """A drafter that was made ready for one target, with what outlives a prompt: weights, stores.

    session: the class of its sessions, which are made of it, their requests and the budget.
    target: what verifies: the given one, unless the drafter was trained together with a fine-tuned
    copy of it (shared mode). mergeable: whether its trees may be parts of larger ones; draws:
    whether their tokens are drawn where the target's are; keeps: whether later prompts find what
    earlier ones stored; adds_rows: whether nodes carry further rows; details: what tables say of it
    beside its name; length: a rule for the length of its drafts, None for none; trained_length:
    tokens of the longest sample that its speculator was trained on, None where nothing says so.
    """

    session: type[Session]
    mergeable, draws, keeps, adds_rows, details, length = True, False, False, False, "", None
    trained_length: int | None = None

    def __init__(self, target: Target):
        self.target = target

    def start(self, requests: Sequence[Request], budget: int) -> Session:
        """A session for requests whose trees will have up to `budget` nodes."""
        return self.session(self, requests, budget)

    @property
    def learns(self) -> bool:
        """Whether drafts depend on the answers to earlier prompts."""
        return self.keeps or (self.length is not None and self.length.carries)

    def memory(self) -> int:
        """Bytes of the stores that drafts are looked up in."""
        return 0

    def forget(self) -> None:
        """Forget what earlier prompts taught: stores, lengths, records."""
        if self.length is not None:
            self.length.forget()


class Drafter(Settings, ABC):
    """Settings of something that proposes tokens, and nothing else: one YAML."""

    section = "drafter"

    @abstractmethod
    def attach(self, target: Target) -> Attached:
        """Load what it needs and check that it fits (`InputError`)."""

    def additions(self) -> list[str]:
        """By which settings it goes beyond its paper, or departs from it."""
        return []

    def variants(self, attached: Attached) -> dict[str, Attached]:
        """What a calibration chooses between, `attached` among them."""
        return {type(self).__name__: attached}

    def attached(self, target: Target) -> Attached:
        """Attached to `target`, once for calls with the same one."""
        known, attached = vars(self).get("_attached", (None, None))
        if known is not target:
            attached = self.attach(target)
            self._attached = target, attached
        return attached


def bytes_of(stores: Iterable[object]) -> int:
    """Memory of objects, dicts, lists and numbers, with all that is in them, each object once."""
    seen: set[int] = set()
    total, waiting = 0, list(stores)
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        total += sys.getsizeof(part)
        if isinstance(part, dict):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            waiting += part
        elif hasattr(part, "__dict__"):
            waiting.append(vars(part))
    return total


class HostSession(Session):
    """Drafts on the host, one request after the other; states: what `attached` keeps of each."""

    def __init__(self, attached: "AttachedHost", requests: Sequence[Request], budget: int):
        self.attached = attached
        self.states = [attached.state(request, budget) for request in requests]
        attached.states = list(self.states)

    def ask(self, verified: Verified) -> None:
        self.brought = self.attached.ask(verified, self.states)

    def draft(self, verified: Verified, budget: int) -> Trees:
        return Trees.of(self.drafts(verified, budget), self.attached.target.device)

    def drafts(self, verified: Verified, budget: int) -> list[Draft]:
        """The next draft of each request."""
        verified.host()
        self.attached.learn(verified, self.states, self.brought and self.brought())
        pairs = zip(verified.requests, self.states, strict=True)
        drafts = [self.attached.drafted(request, state, budget) for request, state in pairs]
        for request, draft in zip(verified.requests, drafts, strict=True):
            if draft.tokens[0] != request.tokens[-1]:
                raise ValueError(
                    f"{type(self.attached).__name__}.drafted: the root of a draft is the last "
                    "token of the text"
                )
        return [draft.first(budget) if len(draft) > budget else draft for draft in drafts]

    def keep(self, indices: list[int]) -> None:
        self.states = [self.states[index] for index in indices]

    def join(self, other: "HostSession") -> None:
        self.states += other.states


class AttachedHost(Attached):
    """Drafts on the host, request by request; states: of the last session's requests."""

    session = HostSession

    def __init__(self, target: Target, settings: Drafter):
        super().__init__(target)
        self.settings, self.states = settings, []
        self.details = ", ".join(settings.additions())

    def state(self, request: Request, budget: int) -> object:
        """What is kept of a new request."""

    def ask(self, verified: Verified, states: list) -> Brought | None:
        """What `learn` needs: `verified.bring` of it."""

    def learn(self, verified: Verified, states: list, brought: list[torch.Tensor] | None) -> None:
        """Take up what was verified, before the next drafts. `Auto` leaves out steps: what is new
        stands in the tokens of the requests."""

    @abstractmethod
    def drafted(self, request: Request, state: object, budget: int) -> Draft:
        """The next draft of one request: up to `budget` nodes, the most worth first; the root is
        the last token of its text. Nodes deeper than `request.room - 1` are of no use; room is 0
        where the answer has just ended."""
