"""Text to token ids through the target's chat template, with the mask of supervised tokens.

The mask comes from rendering incrementally (prompt alone, then prompt and completion) and is
checked against the template's own `{% generation %}` markers where it has them: the two must
agree, there is no silent fallback. A tokenizer without a template gets prompt + completion + EOS.
"""

from dataclasses import dataclass

from slipstream.core.errors import InputError


@dataclass(frozen=True)
class Sample:
    """Token ids of one rendered row; ids from `prompt_length` on are supervised."""

    ids: list[int]
    prompt_length: int


def render_prompt(tokenizer, prompt: str) -> list[int]:
    """Token ids a model is given to answer `prompt`."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt).input_ids
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]


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
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
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
    marked = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    sample = render_sample(tokenizer, prompt, completion)
    supervised = [int(position >= sample.prompt_length) for position in range(len(sample.ids))]
    if marked["assistant_masks"] != supervised:
        raise InputError(
            "target.tokenizer: the chat template's {% generation %} markers and the rendered "
            "answer disagree about which tokens are supervised; mend the template"
        )
