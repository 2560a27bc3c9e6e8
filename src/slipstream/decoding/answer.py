"""One answer in the making: what is emitted, and where it ends (end token, stop string, limit)."""

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.core.errors import InputError
from slipstream.decoding.statistics import Statistics
from slipstream.targets.target import Target

TokenCallback = Callable[[int, bool], None]
"""Called with each token as it is decided, and whether it had been drafted."""


@dataclass(frozen=True)
class Limits:
    """When an answer ends: after `max_new_tokens`, or once its text holds one of `stop`."""

    max_new_tokens: int = 96
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError("max_new_tokens: must be at least 1")

    def check_prompts(self, target: Target, prompts: list[list[int]]) -> list[int]:
        """How many tokens may be emitted for each; `InputError` if a prompt leaves no room."""
        rooms = []
        for number, ids in enumerate(prompts):
            name = "prompt" if len(prompts) == 1 else f"prompt {number} of the batch"
            if not ids:
                raise InputError(f"{name}: it has no tokens; give some text")
            room = target.max_positions - len(ids)
            if room < 1:
                raise InputError(
                    f"{name}: {len(ids)} tokens do not fit the target's context of "
                    f"{target.max_positions}; shorten the prompt or choose a target with a longer "
                    "one"
                )
            rooms.append(min(self.max_new_tokens, room))
        return rooms


@dataclass(frozen=True)
class Run:
    """Tokens that SPRINTER drafted and kept between two calls of the target.

    ended: by 'doubt' (one more token was judged by the target), by 'cap' (the target drew the next
    token; also where the draft model's context is full) or by the 'end' of the answer.
    """

    kept: int
    ended: str


@dataclass(frozen=True)
class Generation:
    """ids: emitted tokens, the end token included; text: without special tokens, cut before a
    stop string; finished: 'end', 'stop' or 'length'; runs: of SPRINTER alone."""

    ids: list[int]
    text: str
    finished: str
    statistics: Statistics
    runs: tuple[Run, ...] = ()


class Answer:
    """Collects tokens until the answer is finished; what comes after its end never counts."""

    def __init__(
        self, target: Target, limits: Limits, room: int, callback: TokenCallback | None = None
    ):
        self.target, self.limits, self.room, self.callback = target, limits, room, callback
        self.ids: list[int] = []
        self.finished: str | None = None
        self._stop_at: int | None = None

    def emit(self, token: int, drafted: bool) -> None:
        """Take one decided token; ignored once the answer is finished."""
        if self.finished is not None:
            return
        self.ids.append(token)
        if self.callback is not None:
            self.callback(token, drafted)
        if token in self.target.end_ids:
            self.finished = "end"
        elif self.limits.stop and self._holds_stop_string():
            self.finished = "stop"
        elif len(self.ids) >= self.room:
            self.finished = "length"

    def text(self) -> str:
        if self.target.tokenizer is None:
            return ""
        text = self.target.tokenizer.decode(self.ids, skip_special_tokens=True)
        return text if self._stop_at is None else text[: self._stop_at]

    def _holds_stop_string(self) -> bool:
        text = self.target.tokenizer.decode(self.ids, skip_special_tokens=True)
        found = [text.find(stop) for stop in self.limits.stop if stop in text]
        self._stop_at = min(found, default=None)
        return bool(found)
