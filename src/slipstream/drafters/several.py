"""What drafters made of several others share: one that merges their trees, and one that chooses."""

from abc import abstractmethod
from collections.abc import Sequence

from slipstream.core.errors import InputError
from slipstream.drafters.base import Attached, Drafter, Request, Session
from slipstream.targets.target import Target


class Several(Drafter):
    """Settings of a drafter that has `drafters`, by name, None where one is left out."""

    def __init__(self, drafters: dict[str, Drafter | None]):
        self.drafters = {name: each for name, each in drafters.items() if each is not None}
        if not self.drafters:
            raise InputError("drafter.drafters: name at least one drafter")

    def attached_parts(self, target: Target) -> tuple[Target, dict[str, Attached]]:
        """Each drafter attached to the target that the one before it verifies with, and the target
        of the last."""
        parts: dict[str, Attached] = {}
        for name, drafter in self.drafters.items():
            parts[name] = drafter.attach(target)
            if not parts[name].mergeable:
                raise InputError(
                    f"drafter.drafters.{name}: trees of {type(drafter).__name__} cannot be parts "
                    "of larger ones; leave it out"
                )
            target = parts[name].target
        return target, parts


class AttachedSeveral(Attached):
    """parts: the attached drafters by name; record: of what they have proven to be worth."""

    mergeable = False

    def __init__(self, target: Target, parts: dict[str, Attached]):
        super().__init__(target)
        self.parts = parts
        self.draws = any(part.draws for part in parts.values())
        self.keeps = any(part.keeps for part in parts.values())
        self.record = self.new_record()

    @abstractmethod
    def new_record(self) -> object:
        """A record that knows nothing yet."""

    def sessions(self, requests: Sequence[Request], budget: int) -> dict[str, Session]:
        """One of each drafter; `InputError` where one would draw its tokens."""
        if self.draws and not all(request.sampling.greedy for request in requests):
            raise InputError(
                "drafter.drafters: a draft model that samples cannot be combined with others; "
                "leave it out, or set sampling.temperature=0"
            )
        return {name: part.start(requests, budget) for name, part in self.parts.items()}

    def memory(self) -> int:
        return sum(part.memory() for part in self.parts.values())

    def forget(self) -> None:
        self.record = self.new_record()
        for part in self.parts.values():
            part.forget()
