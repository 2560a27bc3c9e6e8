"""Text to token ids through the target's chat template, with the spans of supervised tokens.

Spans come from rendering incrementally (a prompt alone, then with its answer, turn by turn) and are
checked against the template's own `{% generation %}` markers where it has them: the two must
agree, there is no silent fallback. A tokenizer without a template gets prompt + completion + EOS,
if it has one.
"""

from dataclasses import dataclass

from jinja2 import TemplateError

from slipstream.core.errors import InputError
from slipstream.data.rows import Messages, check_messages, messages_of


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
    def supervised(self) -> list[tuple[int, int]]:
        """(start, stop) of every span of supervised tokens, in their order."""
        return [*self.earlier, (self.prompt_length, len(self.ids))]


def render_prompt(tokenizer, prompt: str | Messages) -> list[int]:
    """Token ids a model is given to answer `prompt`: a text, or the messages of a conversation.

    Raises `InputError` for messages that are malformed or end with an answer, and where the
    tokenizer has no chat template for them, or one that does not take them.
    """
    if isinstance(prompt, str) and tokenizer.chat_template is None:
        return tokenizer(prompt).input_ids
    messages = messages_of(prompt)
    check_messages(messages)
    if messages[-1]["role"] in ("assistant", "system"):
        raise InputError(
            f"messages: the last one is of the {messages[-1]['role']}, so there is nothing to "
            "answer and one of the user must follow"
        )
    return _render(tokenizer, messages, add_generation_prompt=True)["input_ids"]


def render_sample(tokenizer, prompt: str | Messages, completion: str) -> Sample:
    """Token ids of a prompt and its answer; all answers of a conversation are supervised.

    Raises `InputError` if the template is not incremental, and as `render_prompt` does.
    """
    if isinstance(prompt, str) and tokenizer.chat_template is None:
        prompt_ids = render_prompt(tokenizer, prompt)
        completion_ids = tokenizer(completion, add_special_tokens=False).input_ids
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
                "in which every turn leaves the ones before it as they are"
            )
        ids = after
        spans.append((len(before), len(after)))
    return Sample(ids, spans[-1][0], tuple(spans[:-1]))


def check_generation_markers(tokenizer, prompt: str | Messages, completion: str) -> None:
    """Compare the incremental spans of one row with the template's `{% generation %}` markers."""
    if tokenizer.chat_template is None or "generation %}" not in tokenizer.chat_template:
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


def _render(tokenizer, messages: Messages, **options):
    """What the chat template makes of a conversation; `InputError` where it cannot."""
    if tokenizer.chat_template is None:
        raise InputError(
            "messages: the target's tokenizer has no chat template to render them with; set "
            "target.chat_template, or give a plain prompt"
        )
    try:
        found = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        _check_roles(tokenizer, messages)
    except TemplateError as error:
        reason = " ".join(str(error).split()).replace(". ", ", ").rstrip(".")
        raise InputError(
            f"messages: the target's chat template does not take them ({reason}); change their "
            "roles or their order, or set target.chat_template"
        ) from error
    return found


def _check_roles(tokenizer, messages: Messages) -> None:
    """`InputError` for a role that the template renders as an answer, or not at all, as some do
    with those that they do not know."""

    def text(messages: Messages) -> str | None:
        """As the template renders it; None where it refuses to."""
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False)
        except TemplateError:
            return None

    for role in {message["role"] for message in messages} - {"user", "assistant"}:
        others = [message for message in messages if message["role"] != role]
        named = {role: "assistant"}
        answers = [m | {"role": named.get(m["role"], m["role"])} for m in messages]
        if text(messages) in (text(others), text(answers)):
            raise InputError(
                f"messages: the target's chat template knows no {role} role; leave such messages "
                "out, or set target.chat_template"
            )
