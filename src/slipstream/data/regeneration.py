"""Answers of the target itself as training data: a speculator learns best from what it is to
foresee. Conversations are answered turn by turn. Who answers, and how answers are kept, is said in
other files.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

from slipstream.core.errors import InputError
from slipstream.core.files import key_of
from slipstream.core.settings import Len, NotNegative, Positive, Settings, Size, Text
from slipstream.data.answers import Answered, Answerer, Question, kept_answers
from slipstream.data.endpoint import Endpoint
from slipstream.data.refill import OwnAnswers
from slipstream.data.rendering import Sample, render_prompt
from slipstream.data.rows import Messages
from slipstream.targets.target import Target

log = logging.getLogger(__name__)


@dataclass
class Regeneration(Settings):
    """How prompts are answered.

    temperature: 0 is greedy; of a list each prompt takes one, by the seed and its number.
    memory_gib: what the caches of the requests that are answered together may take. endpoint: an
    OpenAI-compatible server that answers in the target's place, 'http://host:port/v1'; model: what
    it calls the target; concurrency: prompts it is given at a time; key_variable: the environment
    variable with its key. Raises `InputError` for values that cannot be.
    """

    temperature: NotNegative | Annotated[Sequence[NotNegative], Len(1)] = 0.0
    memory_gib: Positive = 8.0
    endpoint: Text | None = None
    model: Text | None = None
    concurrency: Size = 32
    key_variable: Text | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.temperature
        self.temperatures = list(given) if isinstance(given, Sequence) else [given]
        if self.endpoint is not None and self.model is None:
            raise InputError("model: say what the server at the endpoint calls the target")

    def samples(
        self,
        target: Target,
        tokenizer,
        prompts: list[str | Messages],
        max_new_tokens: int,
        cache_dir: str | Path,
        seed: int,
        max_length: int | None = None,
        field: str = "data.cache_dir",
    ) -> list[Sample]:
        """The prompts with their answers, in order; the assistant's turns in a conversation are
        answered anew, one after the other, and all of them are supervised.

        An answer that does not end within `max_new_tokens` is kept as far as it goes: nothing
        follows its last token, so no end is learned, and the conversation stops there. What goes
        beyond `max_length` tokens is left out. A conversation is one sample, unless the chat
        template shows earlier turns in another way than they were written: then those before are
        samples of their own. Raises `InputError` if answers are missing and the folder of config
        `field` cannot be written.
        """
        answerer = self._answerer(target, tokenizer, max_new_tokens)
        settings = [*self._identity(target), max_new_tokens, self.temperatures, seed]
        folder, most = Path(cache_dir), math.inf if max_length is None else max_length
        written = [Conversation(prompt, most) for prompt in prompts]
        num_answers = num_cut = 0
        while asked := [number for number, own in enumerate(written) if own.ask(tokenizer)]:
            questions = [
                Question(
                    (own := written[number]).said, own.ids, *self._drawn(number, seed, own.ids)
                )
                for number in asked
            ]
            texts = [[each.prompt, each.ids] for each in questions]
            path = folder / f"{key_of(settings, asked, texts)}.jsonl"
            answers = kept_answers(path, questions, answerer, field)
            for number, answer in zip(asked, answers, strict=True):
                written[number].take(answer, tokenizer)
            num_answers += len(answers)
            num_cut += sum(not answer.ended for answer in answers)
        if num_cut:
            log.warning(
                "kept %d of %d answers that did not end within data.max_new_tokens=%d tokens; "
                "their end is not learned", num_cut, num_answers, max_new_tokens,
            )  # fmt: skip
        if num_long := sum(own.too_long for own in written):
            log.warning(
                "left out what %d of %d prompts have beyond data.max_length=%d tokens",
                num_long, len(prompts), most,
            )  # fmt: skip
        return [sample for own in written for sample in own.samples()]

    def _answerer(self, target: Target, tokenizer, max_new_tokens: int) -> Answerer:
        if self.endpoint is None:
            return OwnAnswers(target, max_new_tokens, int(self.memory_gib * 2**30))
        given = self.endpoint, self.model, self.concurrency, self.key_variable
        sizes = target.vocab_size, max_new_tokens, target.max_positions
        return Endpoint(*given, tokenizer, *sizes)

    def _identity(self, target: Target) -> list[object]:
        """What answers depend on, beside their settings."""
        return [target.fingerprint, str(target.dtype) if self.endpoint is None else self.model]

    def _drawn(self, number: int, seed: int, ids: list[int]) -> tuple[float, int]:
        """Temperature of the answers to a prompt (not in turn: so may kinds of prompts come), and
        the seed of this one, which no other prompt, turn or split has."""
        temperature = Random(f"{seed} {number}").choice(self.temperatures)
        return temperature, int(key_of(seed, number, ids), 16) % 2**31


@dataclass
class Conversation:
    """A prompt on its way to samples. said: what was said so far; ids: as the target reads it;
    spans: of answers in `ids`; most: tokens there may be."""

    prompt: str | Messages
    most: float
    said: str | Messages = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    too_long: bool = False

    def __post_init__(self) -> None:
        self._finished: list[Sample] = []
        self._turns = self._asking()

    def _asking(self) -> Iterator[str | Messages]:
        """What is said before each answer: given messages, with the answers in place of theirs;
        what the assistant says unasked stays."""
        if isinstance(self.prompt, str):
            yield self.prompt
            return
        for number, message in enumerate(self.prompt):
            answer = message["role"] == "assistant" and number
            if answer and self.said[-1]["role"] not in ("assistant", "system"):
                yield self.said
            else:
                self.said = [*self.said, message]
        yield self.said

    def ask(self, tokenizer) -> bool:
        """Go on to the next turn of the user; False where there is none, or no room for it."""
        said = next(self._turns, None)
        if said is None:
            return False
        ids = render_prompt(tokenizer, said)
        if len(ids) >= self.most:
            self.too_long, self._turns = True, iter(())
            return False
        if ids[: len(self.ids)] != self.ids:
            self._finished, self.spans = self.samples(), []
        self.said, self.ids = said, ids
        return True

    def take(self, answer: Answered, tokenizer) -> None:
        """The answer to what was asked last."""
        start, self.ids = len(self.ids), self.ids + answer.ids
        self.too_long = len(self.ids) > self.most
        if answer.ids and not self.too_long:
            self.spans.append((start, len(self.ids)))
        if self.too_long or not answer.ended:
            self._turns = iter(())
        elif not isinstance(self.said, str):
            text = tokenizer.decode(answer.ids, skip_special_tokens=True)
            self.said = [*self.said, {"role": "assistant", "content": text}]

    def samples(self) -> list[Sample]:
        """What there is to learn from so far."""
        if not self.spans:
            return self._finished
        *earlier, (start, stop) = self.spans
        return [*self._finished, Sample(self.ids[:stop], start, tuple(earlier))]
