"""What drafters made of several others share: one that merges their trees, and one that chooses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.core.errors import InputError
from slipstream.drafters.base import Attached, Drafter, Request, Session, Verified
from slipstream.targets.rows import Rows
from slipstream.targets.target import Target


@dataclass(eq=False)
class Several(Drafter):
    """Settings of a drafter that has `drafters`, by name, None where one is left out."""

    drafters: dict[str, Drafter | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafters = {name: each for name, each in self.drafters.items() if each is not None}
        if not self.drafters:
            raise InputError("drafter.drafters: name at least one drafter")

    def attached_parts(self, target: Target) -> tuple[Target, dict[str, Attached]]:
        """Each drafter, attached to the target of the one before it, and the target of the last."""
        parts: dict[str, Attached] = {}
        for name, drafter in self.drafters.items():
            parts[name] = drafter.attach(target)
            if not parts[name].mergeable:
                raise InputError(
                    f"drafter.drafters.{name}: trees of {type(drafter).__name__} cannot be parts "
                    "of larger ones; leave it out"
                )
            target = parts[name].target
        if sum(part.adds_rows for part in parts.values()) > 1:
            raise InputError(
                "drafter.drafters: the nodes of a forward carry the streams of one drafter; set "
                "schedule=deferred for all others"
            )
        return target, parts


class AttachedSeveral(Attached):
    """parts: the attached drafters by name; record: what they have proven to be worth in all
    prompts. Prompts that are answered at the same time share it without harm: it changes which
    tokens are drafted, and no answer depends on that. new_record: makes an empty record."""

    mergeable, learns = False, True

    def __init__(
        self,
        target: Target,
        parts: dict[str, Attached],
        new_record: Callable[[], object],
        session: "type[SeveralSession]",
    ):
        super().__init__(target)
        self.parts, self.new_record, self.session = parts, new_record, session
        self.draws = any(part.draws for part in parts.values())
        self.keeps = any(part.keeps for part in parts.values())
        trained = [part.trained_length for part in parts.values() if part.trained_length]
        self.trained_length = min(trained, default=None)
        said = {name: part.details for name, part in parts.items()}
        self.details = ", ".join(f"{name} ({own})" for name, own in said.items() if own)
        self.record = self.new_record()

    def memory(self) -> int:
        return sum(part.memory() for part in self.parts.values())

    def forget(self) -> None:
        self.record = self.new_record()
        for part in self.parts.values():
            part.forget()


class SeveralSession(Session):
    """sessions: of all drafters, by name. `InputError` where one would draw its tokens."""

    def __init__(self, attached: AttachedSeveral, requests: Sequence[Request], budget: int):
        if attached.draws and not all(request.sampling.greedy for request in requests):
            raise InputError(
                "drafter.drafters: a draft model that samples cannot be combined with others; "
                "leave it out, or set sampling.temperature=0"
            )
        self.attached, parts = attached, attached.parts
        self.sessions = {name: part.start(requests, budget) for name, part in parts.items()}
        self.visitors = [visitor for each in self.sessions.values() for visitor in each.visitors]
        self.extra_rows = sum(session.extra_rows for session in self.sessions.values())

    def ask(self, verified: Verified) -> None:
        for session in self.sessions.values():
            session.ask(verified)

    def read_part(self, rows: Rows, counts: list[int]) -> None:
        for session in self.sessions.values():
            session.read_part(rows, counts)

    def keep(self, indices: list[int]) -> None:
        for session in self.sessions.values():
            session.keep(indices)

    def join(self, other: "SeveralSession") -> None:
        for name, session in self.sessions.items():
            session.join(other.sessions[name])
