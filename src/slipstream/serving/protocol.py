"""What the OpenAI API asks and answers: requests checked, answers and errors in its shape.

Strict: a number in quotes is an error, and so is an option that is not known to change nothing.
"""

import secrets
import time
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.core.settings import MOST, nearest, shown
from slipstream.core.templates import Argument, check_arguments
from slipstream.data.rows import Messages
from slipstream.decoding.answer import Limits
from slipstream.serving.jobs import Job, Told

MOST_PROMPTS, MOST_CHOICES, MOST_STOPS, MOST_ARGUMENTS = 128, 16, 16, 16
UNREAD = """
    user safety_identifier metadata store service_tier parallel_tool_calls moderation request_id
    prompt_cache_key prompt_cache_options prompt_cache_retention generation_config cache_salt
    cache_control priority
""".split()
"""Further fields of clients that change no answer, or that `transformers chat` always sends."""
NEUTRAL = dict.fromkeys(
    """
    logprobs echo use_beam_search continue_final_message include_stop_str_in_output
    include_obfuscation continuous_usage_stats
    """.split(),
    False,
) | {
    "tools": [],
    "functions": [],
    "tool_choice": "auto",
    "function_call": "auto",
    "top_logprobs": 0,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "suffix": "",
    "best_of": 1,
    "min_p": 0,
    "min_tokens": 0,
    "stop_token_ids": [],
    "length_penalty": 1,
    "skip_special_tokens": True,
    "add_special_tokens": True,
    "add_generation_prompt": True,
    "reasoning_content": "",
    "chat_template_kwargs": {},
}
"""Options that this server does not have, and the value that asks for nothing, as null, [] and a
tool choice of "none" do."""


class ApiError(Exception):
    """An error as the API has it, in one sentence. param: the field that is to be mended."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = kinds.get(self.status, kind)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def refusal(sentence: str) -> ApiError:
    """The `ApiError` for the sentence of an `InputError`, whose field stands before its colon."""
    field, colon, _ = sentence.partition(":")
    field = field.removeprefix("sampling.") if colon and " " not in field else None
    long = "do not fit the target's context" in sentence
    return ApiError(400, sentence, field, "context_length_exceeded" if long else None)


def check_model(asked: str | None, model: str) -> None:
    """`ApiError` where a client asks for another model than there is."""
    if asked not in (None, model):
        sentence = f"the model {asked!r} does not exist; this server has {model!r}"
        raise ApiError(404, sentence, "model", "model_not_found")


class Lenient(BaseModel, strict=True, extra="allow"):
    """What may have further fields, as long as they ask for nothing."""

    def check_extra(self, before: str = "") -> None:
        """`ApiError` for a field that asks for something; before: where it stands."""
        for name, value in self.model_extra.items():
            neutral = NEUTRAL.get(name)
            nothing = value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            nothing = nothing or value in (None, [])
            nothing = nothing or (value == "none" and name in ("tool_choice", "function_call"))
            if name not in UNREAD and not nothing:
                known = type(self).model_fields
                remedy = "leave it out" if name in NEUTRAL else nearest(name, known)
                name = before + shown(name)[1:-1]
                raise ApiError(400, f"{name}: this server has no such option; {remedy}", name)


class Part(Lenient):
    type: Literal["text"]
    text: str


class Message(Lenient):
    role: str
    content: str | list[Part]
    name: str | None = None

    def check_extra(self, before: str = "") -> None:
        super().check_extra(before)
        for place, part in enumerate(() if isinstance(self.content, str) else self.content):
            part.check_extra(f"{before}content.{place}.")

    def plain(self) -> dict[str, str]:
        """As templates know it: of parts a line each, and of developers as of the system."""
        role, text = "system" if self.role == "developer" else self.role, self.content
        text = text if isinstance(text, str) else "\n".join(part.text for part in text)
        return {"role": role, "content": text}


class StreamOptions(Lenient):
    include_usage: bool | None = False


Arguments = Annotated[dict[str, Any], Field(max_length=MOST_ARGUMENTS)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Token = Annotated[int, Field(ge=0)]


class Asking(Lenient):
    """What chat and plain completions have in common. None: as the server is configured."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    n: int | None = Field(1, ge=1, le=MOST_CHOICES)
    ignore_eos: bool | None = False
    return_token_ids: bool | None = False
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def asked(self) -> tuple[list[Messages | str | list[int]], dict[str, Argument] | None]:
        """Prompts: messages for the chat template, with its arguments, or texts or tokens."""
        raise NotImplementedError

    def jobs(self, model: str, sampling: Sampling, limits: Limits) -> list[Job]:
        """One for each choice of each prompt; sampling, limits: where nothing is asked. Raises
        `ApiError`."""
        check_model(self.model, model)
        self.check_extra()
        if self.stream_options:
            self.stream_options.check_extra("stream_options.")
        own = self.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
        if own.get("top_k", 1) < 1:  # all tokens, as vLLM has it
            own["top_k"] = None
        seed = secrets.randbits(32) if self.seed is None else self.seed
        try:
            (prompts, told), streamed = self.asked(), bool(self.stream)
            check_arguments(told or {})
            sampling = replace(sampling, **own)
            if self.max_tokens is not None:
                # what is beyond the context is refused by the worker, which knows it
                limits = replace(limits, max_new_tokens=min(self.max_tokens, MOST))
            if self.stop is not None:
                limits = replace(limits, stop=self.stop)
            if self.ignore_eos:
                limits = replace(limits, end_ids=frozenset())
        except InputError as error:
            raise refusal(str(error)) from error
        seeds = range(seed, seed + (self.n or 1))
        given = sampling, limits
        return [Job(prompt, *given, each, streamed, told) for prompt in prompts for each in seeds]


class ChatRequest(Asking):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: Arguments | None = None

    def model_post_init(self, _: Any) -> None:
        self.max_tokens = self.max_completion_tokens or self.max_tokens

    def asked(self) -> tuple[list[Messages], dict[str, Argument] | None]:
        for place, message in enumerate(self.messages):
            message.check_extra(f"messages.{place}.")
        return [[message.plain() for message in self.messages]], self.chat_template_kwargs


Tokens = Annotated[list[Token], Field(min_length=1)]
Several = Annotated[list[str | Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]


class CompletionRequest(Asking):
    prompt: str | Tokens | Several

    def asked(self) -> tuple[list[str | list[int]], None]:
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt if several else [self.prompt], None


def parsed(kind: type[Asking], body: bytes) -> Asking:
    """The request in a body; raises `ApiError` with one sentence for the first thing wrong."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is no valid UTF-8; send JSON in UTF-8") from error
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False)
        # Of a list where a text may stand, too, it is the list that something is wrong in.
        worst = {"too_long": 0, "string_type": 2}
        first = min(found, key=lambda e: worst.get(e["type"], 1) if type(e["input"]) is list else 1)
        if first["type"] == "json_invalid":
            raise ApiError(400, "the body is no valid JSON; send one JSON object") from None
        known = {*kind.model_fields, *Message.model_fields, *Part.model_fields}
        names = [each for each in first["loc"] if each in known or isinstance(each, int)]
        field = ".".join(map(str, names)) or None
        said = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        raise ApiError(400, f"{field or 'body'}: {said}", field) from None


class Shape:
    """The answers to one request, `count` choices, which go on as the worker tells."""

    def __init__(self, asked: Asking, model: str, count: int):
        self.asked, self.chat = asked, isinstance(asked, ChatRequest)
        self.model, self.created = model, int(time.time())
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.texts, self.ends = [[] for _ in range(count)], [Told()] * count
        self.tells_usage = bool(asked.stream_options and asked.stream_options.include_usage)

    def take(self, index: int, told: Told) -> None:
        self.texts[index].append(told.text)
        if told.last:
            self.ends[index] = told

    def _object(self, streamed: bool, choices: list[dict], **more: object) -> dict:
        kind = "chat.completion" if self.chat else "text_completion"
        kind += ".chunk" if self.chat and streamed else ""
        more |= {"usage": None} if streamed and self.tells_usage and not more else {}
        own = dict(id=self.id, object=kind, created=self.created, model=self.model)
        return {**own, "choices": choices, **more}

    def opening(self, index: int) -> dict | None:
        """The first chunk of a choice of a chat: who speaks."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._object(True, [choice]) if self.chat else None

    def chunk(self, index: int, told: Told) -> dict:
        text = {"delta": {"content": told.text} if told.text else {}}
        text = text if self.chat else {"text": told.text}
        choice = {"index": index, **text, "logprobs": None, "finish_reason": told.finish_reason}
        return self._object(True, [choice])

    def whole(self) -> dict:
        choices, texts = [], map("".join, self.texts)
        for index, (text, end) in enumerate(zip(texts, self.ends, strict=True)):
            message = {"role": "assistant", "content": text, "refusal": None}
            own = {"message": message} if self.chat else {"text": text}
            own |= {"token_ids": list(end.ids)} if self.asked.return_token_ids else {}
            choices.append(
                {"index": index, **own, "logprobs": None, "finish_reason": end.finish_reason}
            )
        return self._object(False, choices, usage=self.usage())

    def last_chunk(self) -> dict:
        return self._object(True, [], usage=self.usage())

    def usage(self) -> dict:
        """Tokens of all choices; a prompt counts once, however many choices it has."""
        prompt = sum(end.prompt_tokens for end in self.ends[:: self.asked.n or 1])
        completion = sum(end.completion_tokens for end in self.ends)
        details = {
            "accepted_prediction_tokens": sum(end.drafted for end in self.ends),
            "rejected_prediction_tokens": sum(end.rejected for end in self.ends),
        }
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": details,
        }
