"""Text to token ids through the target's chat template, with the spans of supervised tokens.

Spans come from rendering incrementally (a prompt alone, then with its answer, turn by turn); the
template's own `{% generation %}` markers, where it has them, must agree. A tokenizer without a
template gets prompt + completion + EOS, if it has one.

Special tokens that are spelled in a text are text like any other, unless target.reads_markers is
true: what a user writes can forge no turn. Templates that tell the date tell today's, but in
training always the same: what was answered, and a run that goes on, are known again by it.
"""

import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from inspect import signature

from jinja2 import TemplateError

from slipstream.core.errors import InputError
from slipstream.core.templates import FIELD, Argument, check_arguments
from slipstream.data.rows import Messages, check_messages, check_text, messages_of
from slipstream.decoding.answer import special_tokens

BREAK = "\ufdd0"
"""Put into a spelled special token, so that it is none; a noncharacter, which no text has."""
TRAINED_ON = datetime(2024, 7, 26)
"""The date of training data, which Llama's templates name where they know none."""
NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
"""How a template asks for the date, in the form that stands between the quotes."""
MARKED = re.compile(r"{%-?\s*generation\s*-?%}")
"""Where a template says that an answer begins."""
NOT_TOLD = set("messages raise_exception strftime_now namespace range loop true false none".split())
"""Names in templates that are not the caller's."""
TRAINING: ContextVar[bool] = ContextVar("training", default=False)
"""Whether templates that tell the date tell that of training data."""
MOST_ROLES = 8
"""Besides those of user and assistant; for each of them a conversation is rendered twice."""


@dataclass(frozen=True)
class Sample:
    """Token ids of one rendered row.

    prompt_length: tokens before the last answer, which goes on to the end and is supervised.
    earlier: (start, stop) of the answers within the prompt that are supervised, too.
    """

    ids: list[int]
    prompt_length: int
    earlier: tuple[tuple[int, int], ...] = ()

    @property
    def prompt(self) -> list[int]:
        """The tokens before the last answer."""
        return self.ids[: self.prompt_length]

    @property
    def turns(self) -> "list[Sample]":
        """A sample for each answer, with all that comes before it."""
        return [Sample(self.ids[:stop], start) for start, stop in self.supervised]

    @property
    def supervised(self) -> list[tuple[int, int]]:
        """(start, stop) of every span of supervised tokens, in their order."""
        return [*self.earlier, (self.prompt_length, len(self.ids))]


def _template(tokenizer) -> str:
    """The chat template; in training it has a date of its own."""
    template = tokenizer.get_chat_template()  # the default one, where there are several
    if not TRAINING.get():
        return template
    return NOW.sub(lambda asked: repr(TRAINED_ON.strftime(asked[2])), template)


def _told(tokenizer, template: str, given: Mapping[str, Argument] | None) -> dict[str, Argument]:
    """The arguments of the chat template: those of the target, which `given` ones override."""
    told = (getattr(tokenizer, FIELD, None) or {}) | dict(given or {})
    check_arguments(told)
    others = {*signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    for name in told:
        if name in others | NOT_TOLD or not re.search(rf"\b{name}\b", template):
            raise InputError(
                f"{FIELD}: the target's chat template has no {name!r} that can be told; leave it "
                "out, or look up the names that the template reads"
            )
    return told


def text_ids(tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text that no chat template goes around; add_special_tokens: those that the
    tokenizer begins or ends a text with."""
    split = not getattr(tokenizer, "reads_markers", False)
    given = dict(add_special_tokens=add_special_tokens, split_special_tokens=split)
    return tokenizer(text, **given).input_ids


def render_prompt(
    tokenizer, prompt: str | Messages, arguments: Mapping[str, Argument] | None = None
) -> list[int]:
    """Token ids a model is given to answer `prompt`: a text, or the messages of a conversation.

    arguments: of the chat template; they override those of the target. Raises `InputError` for
    messages that are malformed or end with an answer, and where the tokenizer has no chat template
    for them, or one that does not take them.
    """
    if isinstance(prompt, str) and tokenizer.chat_template is None:
        check_text(prompt, "prompt")
        return text_ids(tokenizer, prompt, add_special_tokens=True)
    messages = messages_of(prompt)
    check_messages(messages)
    if messages[-1]["role"] in ("assistant", "system"):
        raise InputError(
            f"messages: the last one is of the {messages[-1]['role']}, so there is nothing to "
            "answer and one of the user must follow"
        )
    return _render(tokenizer, messages, arguments, add_generation_prompt=True)["input_ids"]


def render_sample(tokenizer, prompt: str | Messages, completion: str) -> Sample:
    """Token ids of a prompt and its answer; all answers of a conversation are supervised.

    Raises `InputError` if the template is not incremental, and as `render_prompt` does.
    """
    if isinstance(prompt, str) and tokenizer.chat_template is None:
        prompt_ids = render_prompt(tokenizer, prompt)
        completion_ids = text_ids(tokenizer, completion)
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return Sample(prompt_ids + completion_ids + end, len(prompt_ids))
    messages, ids, spans = _conversation(prompt, completion), [], []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if place == 0:
            raise InputError("messages: the first one is an answer to nothing; leave it out")
        before = render_prompt(tokenizer, messages[:place])
        after = _render(tokenizer, messages[: place + 1])["input_ids"]
        if before[: len(ids)] != ids or after[: len(before)] != before:
            raise InputError(
                "target.tokenizer: its chat template renders a prompt differently once its answer "
                "or another turn follows, so the supervised tokens cannot be told; use a template "
                "in which every turn leaves the ones before it as they are, or, if it is this row "
                "alone, an answer that begins with no line break"
            )
        ids = after
        spans.append((len(before), len(after)))
    return Sample(ids, spans[-1][0], tuple(spans[:-1]))


def check_generation_markers(tokenizer, prompt: str | Messages, completion: str) -> None:
    """Compare the incremental spans of one row with the template's `{% generation %}` markers."""
    if tokenizer.chat_template is None or not MARKED.search(_template(tokenizer)):
        return
    messages = _conversation(prompt, completion)
    marked = _render(tokenizer, messages, return_assistant_tokens_mask=True)
    sample = render_sample(tokenizer, prompt, completion)
    supervised = [0] * len(sample.ids)
    for start, stop in sample.supervised:
        supervised[start:stop] = [1] * (stop - start)
    if marked["assistant_masks"] != supervised:
        raise InputError(
            "target.tokenizer: the chat template's {% generation %} markers and the rendered "
            "answers disagree about which tokens are supervised; mend the template"
        )


def _conversation(prompt: str | Messages, completion: str) -> Messages:
    """All messages of a row."""
    return [*messages_of(prompt), {"role": "assistant", "content": completion}]


def _render(
    tokenizer, messages: Messages, arguments: Mapping[str, Argument] | None = None, **options: bool
):
    """What the chat template makes of a conversation; `InputError` where it cannot."""
    if tokenizer.chat_template is None:
        raise InputError(
            "messages: the target's tokenizer has no chat template to render them with; set "
            "target.chat_template, or give a plain prompt"
        )
    try:
        template = _template(tokenizer)
        told = {"chat_template": template} | _told(tokenizer, template, arguments)
        found = _tokenized(tokenizer, messages, told, options)
        _check_roles(tokenizer, messages, told)
    except InputError:
        raise
    except Exception as error:  # a template is a program, and what runs it gives no way out of it
        reason = " ".join(str(error).split()).replace(". ", ", ").rstrip(".")
        raise InputError(
            f"messages: the target's chat template does not take them ({reason}); change their "
            "roles or their order, or set target.chat_template"
        ) from error
    return found


def _tokenized(
    tokenizer, messages: Messages, told: dict[str, Argument], options: dict[str, bool]
) -> dict[str, list[int]]:
    """What `apply_chat_template` gives, but with special tokens in the messages as text: these are
    broken, and what broke them is taken out of the tokens."""
    reads = getattr(tokenizer, "reads_markers", False)
    broken = messages if reads else _broken(tokenizer, messages)
    given = dict(told, tokenize=True, return_dict=True, **options)
    if broken == messages:
        return tokenizer.apply_chat_template(messages, **given)
    if not tokenizer.is_fast:
        raise InputError(
            "messages: one spells a special token, which this tokenizer, having no fast kind, "
            "cannot tell from text; leave it out, or set target.reads_markers=true"
        )
    given["tokenizer_kwargs"] = {"return_offsets_mapping": True}
    found = tokenizer.apply_chat_template(broken, **given)
    options = {name: on for name, on in options.items() if name == "add_generation_prompt"}
    text = tokenizer.apply_chat_template(broken, tokenize=False, **told, **options)
    offsets = found.pop("offset_mapping")
    kept = [place for place, (start, end) in enumerate(offsets) if text[start:end] != BREAK]
    return {name: [values[place] for place in kept] for name, values in found.items()}


def _broken(tokenizer, part):
    """`part` of messages, with all special tokens in its texts broken."""
    if isinstance(part, dict):
        return {name: _broken(tokenizer, each) for name, each in part.items()}
    if isinstance(part, list):
        return [_broken(tokenizer, each) for each in part]
    if not isinstance(part, str):
        return part
    marker, count = _markers(tokenizer, len(tokenizer)), 1
    while count:  # what overlaps a broken one may be one, too
        part, count = marker.subn(lambda found: found[0][0] + BREAK + found[0][1:], part)
    return part


@lru_cache(maxsize=8)
def _markers(tokenizer, size: int) -> re.Pattern:
    """Finds any special token of a tokenizer of `size` tokens, but single characters."""
    spelled = sorted(special_tokens(tokenizer), key=len, reverse=True)
    return re.compile("|".join(re.escape(each) for each in spelled if len(each) > 1) or "(?!)")


def _check_roles(tokenizer, messages: Messages, told: dict[str, Argument]) -> None:
    """`InputError` for a role that the template renders as an answer, or not at all, as some do
    with those that they do not know."""

    def text(messages: Messages) -> str | None:
        """As the template renders it; None where it refuses to."""
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, **told)
        except TemplateError:
            return None

    roles = {message["role"] for message in messages} - {"user", "assistant"}
    if len(roles) > MOST_ROLES:
        raise InputError(f"messages: they have more than {MOST_ROLES} roles; give fewer")
    for role in roles:
        others = [m | {"content": m["content"] + "x"} if m["role"] == role else m for m in messages]
        answers = [m | {"role": "assistant"} if m["role"] == role else m for m in messages]
        if text(messages) in (text(others), text(answers)):
            raise InputError(
                f"messages: the target's chat template knows no {role} role; leave such messages "
                "out, or set target.chat_template"
            )
