"""Answers of the target itself as training data: a speculator learns best from what it is to
foresee. Conversations are answered turn by turn. Who answers, and how answers are kept, is said in
other files.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

from slipstream.core.errors import InputError, naming
from slipstream.core.files import key_of
from slipstream.core.settings import Len, NotNegative, Positive, Settings, Size, Text
from slipstream.data.answers import NOTHING, Answered, Question, kept_answers
from slipstream.data.endpoint import Endpoint
from slipstream.data.refill import OwnAnswers
from slipstream.data.rendering import Sample, render_prompt
from slipstream.data.rows import Messages, named
from slipstream.decoding.answer import decoded
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
        beyond `max_length` tokens (None: the target's context) is left out. A conversation is one
        sample, unless the chat template shows earlier turns in another way than they were written:
        then those before are samples of their own. Raises `InputError` if answers are missing and
        the folder of config `field` cannot be written.
        """
        if self.endpoint is None:
            answered_by = str(target.dtype)
            answerer = OwnAnswers(target, max_new_tokens, int(self.memory_gib * 2**30))
        else:
            answered_by = self.model
            given = self.endpoint, self.model, self.concurrency, self.key_variable, tokenizer
            answerer = Endpoint(*given, target.vocab_size, max_new_tokens, target.max_positions)
        # What answers depend on: they are found again by it.
        settings = [target.fingerprint, answered_by, max_new_tokens, self.temperatures, seed]
        folder, most = Path(cache_dir), target.max_positions if max_length is None else max_length
        written = [Conversation(prompt, most) for prompt in prompts]
        num_answers = num_cut = 0
        while asked := {n: own for n, own in enumerate(written) if own.ask(tokenizer)}:
            questions = [
                Question(own.ids, *self._drawn(number, seed, own.ids))
                for number, own in asked.items()
            ]
            texts = [[own.said, own.ids] for own in asked.values()]
            path = folder / f"{key_of(settings, list(asked), texts)}.jsonl"
            answers = kept_answers(path, questions, answerer, field)
            for own, answer in zip(asked.values(), answers, strict=True):
                own.take(answer, tokenizer)
            num_answers += len(answers)
            num_cut += sum(not answer.ended and answer != NOTHING for answer in answers)
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
        samples = [sample for own in written for sample in own.samples()]
        if not samples and answerer.refusal is not None:
            raise answerer.refusal
        return samples

    def _drawn(self, number: int, seed: int, ids: list[int]) -> tuple[float, int]:
        """Temperature of the answers to a prompt (not in turn: so may kinds of prompts come), and
        the seed of this one, which no other prompt, turn or split has."""
        temperature = Random(f"{seed} {number}").choice(self.temperatures)
        return temperature, int(key_of(seed, number, ids), 16) % 2**31


class Conversation:
    """A prompt on its way to samples. said: what was said so far; ids: as the target reads it;
    spans: of answers in `ids`; most: tokens there may be."""

    def __init__(self, prompt: str | Messages, most: int):
        self.most, self.too_long = most, False
        self.said: str | Messages = []
        self.ids: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self._finished: list[Sample] = []
        self._turns = self._asking(prompt)

    def _asking(self, prompt: str | Messages) -> Iterator[str | Messages]:
        """What is said before each answer: given messages, with the answers in place of theirs;
        what the assistant says unasked stays."""
        if isinstance(prompt, str):
            yield prompt
            return
        for number, message in enumerate(prompt):
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
        with naming(named(said)):
            ids = render_prompt(tokenizer, said)
            if not ids:
                raise InputError("it has no tokens; leave the row out, or give it some text")
        if len(ids) >= self.most:
            self.too_long, self._turns = True, iter(())
            return False
        if ids[: len(self.ids)] != self.ids:
            self._finished, self.spans = self.samples(), []
        self.said, self.ids = said, ids
        return True

    def take(self, answer: Answered, tokenizer) -> None:
        """The answer to what was asked last."""
        start, ids = len(self.ids), self.ids + answer.ids
        self.ids, self.too_long = ids[: self.most], len(ids) > self.most
        if answer.ids:
            self.spans.append((start, len(self.ids)))
        if self.too_long or not answer.ended:
            self._turns = iter(())
        elif not isinstance(self.said, str):
            text = decoded(tokenizer, answer.ids)
            self.said = [*self.said, {"role": "assistant", "content": text}]

    def samples(self) -> list[Sample]:
        """What there is to learn from so far."""
        if not self.spans:
            return self._finished
        *earlier, (start, stop) = self.spans
        return [*self._finished, Sample(self.ids[:stop], start, tuple(earlier))]
