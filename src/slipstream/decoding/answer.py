"""One answer in the making: what is emitted, and where it ends (end token, stop string, limit)."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.core.errors import InputError, naming
from slipstream.core.settings import Count, Settings, Text
from slipstream.decoding.statistics import Statistics
from slipstream.targets.target import Target

BYTE = re.compile("<0x([89A-F][0-9A-F])>")
"""A token that is one of the bytes of a character."""
PATIENCE = 16
"""Characters that stay incomplete for longer are looked at every so many tokens."""
TokenCallback = Callable[[int, bool, str], None]
"""Called with each token as it is decided, whether it had been drafted, and the text that it
settles: whole characters, of which none may begin a stop string. Pieces add up to the answer."""


def check_known(target: Target, ids: list[int]) -> None:
    """`InputError` for a token that the target has no embedding for."""
    known = target.model.get_input_embeddings().weight.shape[0]
    if unknown := [token for token in (min(ids), max(ids)) if not 0 <= token < known]:
        raise InputError(
            f"the model has embeddings for {known} tokens, and token {unknown[0]} is none of them; "
            "take the tokenizer that the model was trained with"
        )


@dataclass(frozen=True)
class Limits(Settings):
    """When an answer ends: after `max_new_tokens`, once its text holds one of `stop` (a string, or
    several), or with one of `end_ids`, None for the target's own end tokens."""

    max_new_tokens: Count = 96
    stop: Text | Sequence[Text] = ()
    end_ids: frozenset[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", tuple(stop))

    def check_prompts(self, target: Target, prompts: list[list[int]]) -> list[int]:
        """How many tokens may be emitted for each; `InputError` if a prompt leaves no room."""
        rooms: list[int] = []
        for number, ids in enumerate(prompts):
            name = "prompt" if len(prompts) == 1 else f"prompt {number} of the batch"
            if not ids:
                raise InputError(f"{name}: it has no tokens; give some text")
            with naming(name):
                check_known(target, ids)
            room = target.max_positions - len(ids)
            if room < 1:
                raise InputError(
                    f"{name}: {len(ids)} tokens do not fit the target's context of "
                    f"{target.max_positions}; shorten it, or choose a target with a longer one"
                )
            rooms.append(min(self.max_new_tokens, room))
        return rooms


INCOMPLETE = "\ufffd"
"""What a tokenizer shows of a character whose last bytes are still to come."""


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
    stop string; finished: 'end', 'stop' or 'length'; accepted: drafted tokens that each step of
    the tree engine kept; runs: of SPRINTER alone."""

    ids: list[int]
    text: str
    finished: str
    statistics: Statistics
    runs: tuple[Run, ...] = ()
    accepted: tuple[int, ...] = ()


class Answer:
    """Collects tokens until the answer is finished; what comes after its end never counts.

    drafted: how many of its tokens had been drafted.
    """

    def __init__(
        self, target: Target, limits: Limits, room: int, callback: TokenCallback | None = None
    ):
        if limits.stop and target.tokenizer is None:
            raise InputError("stop: the target has no tokenizer to find texts with; leave it out")
        self.tokenizer, self.limits, self.room = target.tokenizer, limits, room
        self.end_ids = target.end_ids if limits.end_ids is None else limits.end_ids
        special = special_tokens(self.tokenizer) if limits.stop else {}  # which texts leave out
        self._stop_ids = {special[stop] for stop in limits.stop if stop in special}
        self.callback = callback
        self.ids: list[int] = []
        self.drafted = 0
        self.finished: str | None = None
        told = self.tokenizer is not None and (limits.stop or callback is not None)
        self._stream = TextStream(self.tokenizer) if told else None
        self._told = 0

    def emit(self, token: int, drafted: bool) -> None:
        """Take one decided token; ignored once the answer is finished."""
        if self.finished is not None:
            return
        self.ids.append(token)
        self.drafted += drafted
        if self._stream is not None:
            self._stream.add(token)
        if token in self.end_ids:
            self.finished = "end"
        elif token in self._stop_ids or self._stopped(len(self.ids) >= self.room):
            self.finished = "stop"
        elif len(self.ids) >= self.room:
            self.finished = "length"
        if self.callback is not None:
            settled = self._settled()
            self.callback(token, drafted, settled[self._told :])
            self._told = max(self._told, len(settled))

    def text(self) -> str:
        """Without special tokens, cut before a stop string; "" without a tokenizer."""
        if self.tokenizer is None:
            return ""
        text = decoded(self.tokenizer, self.ids) if self._stream is None else self._stream.whole()
        return text[: self._stop_at(text)]

    def _stopped(self, last: bool) -> bool:
        """Whether a stop string is there; last: what is no whole character yet will not be one."""
        if not self.limits.stop:
            return False
        return self._stop_at(self._stream.whole() if last else self._stream.text) is not None

    def _stop_at(self, text: str) -> int | None:
        """Where the first stop string begins."""
        return min((text.find(stop) for stop in self.limits.stop if stop in text), default=None)

    def _settled(self) -> str:
        """The part of the text that tokens to come will not change."""
        if self.finished is not None:
            return self.text()
        text = "" if self._stream is None else self._stream.text
        return text[: len(text) - max(_begun(text, stop) for stop in (*self.limits.stop, ""))]


def special_tokens(tokenizer) -> dict[str, int]:
    """The special tokens of a tokenizer by their texts; transformers' `all_special_tokens` are
    those alone that have a role, as to end an answer."""
    added = tokenizer.added_tokens_decoder.items()
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return {token.content: number for number, token in added if token.special} | dict(named)


def decoded(tokenizer, ids: Sequence[int]) -> str:
    """The text of tokens, special ones left out, blanks as they are: a tokenizer that would clean
    them up changes what was told before."""
    settings = dict(skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return tokenizer.decode(ids, **settings)


class TextStream:
    """The text of growing tokens, whole characters only; each token costs as much as those since
    the last whole characters; characters that stay incomplete are looked at now and then.

    A tokenizer says of some tokens only together how they are spelled, so the tokens since the last
    whole characters are decoded with some before them, and what those alone give is left out.
    Bytes (`<0xNN>`) are decoded once they are whole characters. Special tokens have no text.
    """

    def __init__(self, tokenizer):
        self.tokenizer, self.text = tokenizer, ""
        self._recent: list[int] = []
        self._known = 0
        self._special = frozenset(special_tokens(tokenizer).values())
        self._bytes = b""
        self._incomplete = False

    def add(self, token: int) -> None:
        if token in self._special:
            return
        self._recent.append(token)
        waiting = len(self._recent) - self._known
        if self._incomplete and waiting > PATIENCE and waiting % PATIENCE:
            return
        if byte := BYTE.fullmatch(self.tokenizer.convert_ids_to_tokens(token) or ""):
            self._bytes += bytes.fromhex(byte[1])
            if self._bytes.decode(errors="ignore").encode() != self._bytes:
                return  # the character is not whole yet
        self._bytes = b""
        before, now = self._both()
        self._incomplete = now.endswith(INCOMPLETE)
        if len(now) > len(before) and not self._incomplete:
            self.text += now[len(before) :]
            self._recent, self._known = self._recent[self._known :], len(self._recent) - self._known

    def whole(self) -> str:
        """The text, with what is no whole character yet."""
        before, now = self._both()
        return self.text + now[len(before) :]

    def _both(self) -> tuple[str, str]:
        """Of the last known tokens, and with those after them."""
        parts = self._recent[: self._known], self._recent
        before, now = (decoded(self.tokenizer, own) for own in parts)
        if not now.startswith(before):  # bytes that are no character spoil the run they are in
            before, now = "", decoded(self.tokenizer, self._recent[self._known :])
        return before, now


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` may begin `stop`.

    >>> _begun("a <", "<end>"), _begun("a < b", "<end>")
    (1, 0)
    """
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
