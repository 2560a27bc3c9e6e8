"""What travels between the server's processes and threads: jobs, and what is told of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.core.templates import Argument
from slipstream.data.rendering import render_prompt, text_ids
from slipstream.data.rows import Messages
from slipstream.decoding.answer import Limits
from slipstream.decoding.request import Answering
from slipstream.targets.target import Target


@dataclass(frozen=True)
class Job:
    """What is asked for, as it travels to a worker. prompt: messages for the chat template, a plain
    text, or its tokens; streamed: whether pieces are wanted before the end; arguments: of the
    template."""

    prompt: Messages | str | list[int]
    sampling: Sampling
    limits: Limits
    seed: int
    streamed: bool
    arguments: dict[str, Argument] | None = None

    def ids(self, target: Target, most_bytes: int) -> list[int]:
        """The tokens of the prompt; `InputError` for a text of more than `most_bytes`, which is too
        long whatever its tokens are: to find them would take long."""
        prompt = self.prompt
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            return prompt
        texts = [prompt] if isinstance(prompt, str) else chain(*map(dict.values, prompt))
        if (size := sum(len(text.encode()) for text in texts)) > most_bytes:
            raise InputError(
                f"prompt: {size} bytes do not fit the target's context of "
                f"{target.max_positions} tokens; shorten it"
            )
        if isinstance(prompt, str):
            return text_ids(target.tokenizer, prompt, add_special_tokens=True)
        return render_prompt(target.tokenizer, prompt, self.arguments)


@dataclass(frozen=True)
class Told:
    """What a worker tells of a job. accepted: it will be answered; text: what the answer goes on
    with; finish_reason, counts of tokens, and `ids` of all of them: at the end; refused: why there
    is no answer."""

    accepted: bool = False
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    rejected: int = 0
    ids: tuple[int, ...] = ()
    refused: str | None = None
    failed: bool = False

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.refused is not None


@dataclass(eq=False)
class Asked:
    """A job with its request. tell: passes on what is decided; gone: whether nobody waits for it
    any more; pieces: text that is still to be told; the last three: what was counted of it."""

    job: Job
    tell: Callable[[Told], None]
    gone: Callable[[], bool]
    request: Answering | None = None
    prompt_tokens: int = 0
    pieces: list[str] = field(default_factory=list)
    tokens: int = 0
    rows: int = 0
    forwards: int = 0
