"""Prompts and answers to token ids: texts and conversations."""

import pytest
from tests.commands import refused
from tests.tiny import tiny_tokenizer

from slipstream.data.rendering import render_prompt

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}w1 {{ message['content'] }} w2 "
    "{% elif message['role'] == 'system' %}w3 {{ message['content'] }} "
    "{% else %}{% generation %}{{ message['content'] }} w4 {% endgeneration %}"
    "{% endif %}{% endfor %}"
)
NO_SYSTEM = TEMPLATE.replace(
    "{% elif message['role'] == 'system' %}w3 {{ message['content'] }} ", ""
)
STRICT = "{{ raise_exception('Roles must alternate. Give a user.') }}"


def tokenizer(template=TEMPLATE):
    found = tiny_tokenizer()
    found.chat_template = template
    return found


def said(*turns):
    """The messages of 'user w5', 'assistant w6' ..."""
    return [dict(zip(("role", "content"), turn.split(" ", 1), strict=True)) for turn in turns]


def test_a_text_is_the_message_of_a_user():
    assert render_prompt(tokenizer(), "w5") == render_prompt(tokenizer(), said("user w5"))
    assert render_prompt(tokenizer(), "w5") == [1, 5, 2]


def test_a_conversation_is_rendered_with_its_history():
    messages = said("system w9", "user w5", "assistant w6 w7", "user w8")
    assert render_prompt(tokenizer(), messages) == [3, 9, 1, 5, 2, 6, 7, 4, 1, 8, 2]


@pytest.mark.parametrize(
    "messages, template, expected",
    [
        ([], TEMPLATE, "messages: give a list"),
        ({"role": "user"}, TEMPLATE, "messages: give a list"),
        (["w5"], TEMPLATE, "messages[0]: it has no text 'role'"),
        ([{"role": "user", "content": None}], TEMPLATE, "messages[0]: it has no text 'content'"),
        (said("user w5", "assistant w6"), TEMPLATE, "messages: the last one is of the assistant"),
        (said("user w5"), None, "messages: the target's tokenizer has no chat template"),
        (said("user w5"), STRICT, "messages: the target's chat template does not take them"),
        (said("system w9", "user w5"), NO_SYSTEM, "messages: the target's chat template knows no"),
    ],
)
def test_messages_that_cannot_be_rendered_end_with_one_sentence(messages, template, expected):
    assert refused(lambda: render_prompt(tokenizer(template), messages)).startswith(expected)
