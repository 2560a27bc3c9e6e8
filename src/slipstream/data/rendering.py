"""Text to token ids through the target's chat template, with the mask of supervised tokens.

The mask comes from rendering incrementally (prompt alone, then prompt and completion) and is
checked against the template's own `{% generation %}` markers where it has them: the two must
agree, there is no silent fallback. A tokenizer without a template gets prompt + completion + EOS.
"""

from dataclasses import dataclass

from jinja2 import TemplateError

from slipstream.core.errors import InputError

Messages = list[dict[str, str]]
"""A conversation: the role ('system', 'user', 'assistant') and the content of each message."""


@dataclass(frozen=True)
class Sample:
    """Token ids of one rendered row; ids from `prompt_length` on are supervised."""

    ids: list[int]
    prompt_length: int


def render_prompt(tokenizer, prompt: str | Messages) -> list[int]:
    """Token ids a model is given to answer `prompt`: a text, or the messages of a conversation.

    Raises `InputError` for messages that are malformed or end with an answer, and where the
    tokenizer has no chat template for them, or one that does not take them.
    """
    if isinstance(prompt, str):
        if tokenizer.chat_template is None:
            return tokenizer(prompt).input_ids
        prompt = [{"role": "user", "content": prompt}]
    check_messages(prompt)
    if prompt[-1]["role"] in ("assistant", "system"):
        raise InputError(
            f"messages: the last one is of the {prompt[-1]['role']}, so there is nothing to answer "
            "and one of the user must follow"
        )
    return _render(tokenizer, prompt, add_generation_prompt=True)["input_ids"]


def check_messages(messages: object) -> None:
    """`InputError` unless these are one or more messages with the texts `role` and `content`."""
    if not isinstance(messages, list) or not messages:
        raise InputError("messages: give a list of at least one message with role and content")
    for place, message in enumerate(messages):
        for name in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(name), str):
                raise InputError(
                    f"messages[{place}]: it has no text {name!r}; every message needs 'role' and "
                    "'content'"
                )


def _render(tokenizer, messages: Messages, **options):
    """What the chat template makes of a conversation; `InputError` where it cannot."""
    if tokenizer.chat_template is None:
        raise InputError(
            "messages: the target's tokenizer has no chat template to render them with; set "
            "target.chat_template, or give a plain prompt"
        )
    try:
        found = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        if any(message["role"] == "system" for message in messages):
            _check_system_role(tokenizer, messages)
    except TemplateError as error:
        reason = " ".join(str(error).split()).replace(". ", ", ").rstrip(".")
        raise InputError(
            f"messages: the target's chat template does not take them ({reason}); change their "
            "roles or their order, or set target.chat_template"
        ) from error
    return found


def _check_system_role(tokenizer, messages: Messages) -> None:
    """`InputError` if the template renders what the system says as an answer, as some do that
    know no such role."""
    answers = [
        message | {"role": "assistant"} if message["role"] == "system" else message
        for message in messages
    ]
    try:
        as_answers = tokenizer.apply_chat_template(answers, tokenize=False)
    except TemplateError:
        return
    if as_answers == tokenizer.apply_chat_template(messages, tokenize=False):
        raise InputError(
            "messages: the target's chat template knows no system role; leave the system message "
            "out, or set target.chat_template"
        )


def render_sample(tokenizer, prompt: str, completion: str) -> Sample:
    """Token ids of prompt and answer; `InputError` if the template is not incremental."""
    prompt_ids = render_prompt(tokenizer, prompt)
    if tokenizer.chat_template is None:
        completion_ids = tokenizer(completion, add_special_tokens=False).input_ids
        return Sample(prompt_ids + completion_ids + [tokenizer.eos_token_id], len(prompt_ids))
    messages = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": completion},
    ]
    ids = _render(tokenizer, messages)["input_ids"]
    if ids[: len(prompt_ids)] != prompt_ids:
        raise InputError(
            "target.tokenizer: its chat template renders the prompt differently once the answer "
            "follows, so the supervised tokens cannot be told; use a template whose prompt "
            "is a prefix of the conversation"
        )
    return Sample(ids, len(prompt_ids))


def check_generation_markers(tokenizer, prompt: str, completion: str) -> None:
    """Compare the incremental mask of one row with the template's `{% generation %}` markers."""
    if tokenizer.chat_template is None or "generation %}" not in tokenizer.chat_template:
        return
    messages = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": completion},
    ]
    marked = _render(tokenizer, messages, return_assistant_tokens_mask=True)
    sample = render_sample(tokenizer, prompt, completion)
    supervised = [int(position >= sample.prompt_length) for position in range(len(sample.ids))]
    if marked["assistant_masks"] != supervised:
        raise InputError(
            "target.tokenizer: the chat template's {% generation %} markers and the rendered "
            "answer disagree about which tokens are supervised; mend the template"
        )
