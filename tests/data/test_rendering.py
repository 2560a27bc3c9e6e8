"""Prompts and answers to token ids: texts and conversations."""

from datetime import datetime

import pytest
from omegaconf import OmegaConf
from tests.commands import ROOT, refused
from tests.tiny import tiny_tokenizer
from transformers import AutoTokenizer, ByT5Tokenizer

from slipstream.assets import locate
from slipstream.core.settings import set_to
from slipstream.data.batches import collate
from slipstream.data.rendering import (
    TRAINING,
    Sample,
    check_generation_markers,
    render_prompt,
    render_sample,
)
from slipstream.speculators.losses import NO_LABEL, future_tokens

TARGETS = ROOT / "conf" / "target"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}w1 {{ message['content'] }} w2 "
    "{% elif message['role'] == 'system' %}w3 {{ message['content'] }} "
    "{% else %}{% generation %}{{ message['content'] }} w4{% endgeneration %} "
    "{% endif %}{% endfor %}"
)
NO_SYSTEM = TEMPLATE.replace(
    "{% elif message['role'] == 'system' %}w3 {{ message['content'] }} ", ""
)
# As many have it: what is not the user's is an answer, or nothing at all.
UNHEARD = NO_SYSTEM.replace("{% else %}", "{% elif message['role'] == 'assistant' %}")
STRICT = "{{ raise_exception('Roles must alternate. Give a user.') }}"


DATED = "w{{ strftime_now('%d') | int }} w{{ strftime_now('%m') | int }} "


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


def test_templates_that_tell_the_date_tell_one_date_in_training():
    """So that a run which goes on the next day has the same samples."""
    found = tokenizer(DATED + TEMPLATE)
    now = datetime.now()
    assert render_prompt(found, "w5")[:2] in ([now.day, now.month], [datetime.now().day, now.month])
    with set_to(TRAINING, True):
        assert render_prompt(found, "w5") == [26, 7, 1, 5, 2]
        assert render_sample(found, "w5", "w6").ids == [26, 7, 1, 5, 2, 6, 4]
        found.chat_template = {"default": TEMPLATE, "tool_use": NO_SYSTEM}
        assert render_prompt(found, "w5") == [1, 5, 2]
    assert render_prompt(found, "w5") == [1, 5, 2]


def test_a_template_has_arguments():
    """What is no argument of it, or could forge a turn, is refused."""
    found = tokenizer("{{ mode }}{{ most }}{{ 'w9 ' if brief else 'w8 ' }}" + TEMPLATE)
    assert render_prompt(found, "w5") == [8, 1, 5, 2]
    told = {"brief": True, "mode": "w7 ", "most": ""}
    assert render_prompt(found, "w5", told) == [7, 9, 1, 5, 2]
    assert render_prompt(found, "w5 <s>x", {"brief": True})[0] == 9
    values = None, ["w9"], "<s>", "it's", float("nan"), "b" * 65
    wrongs = [{"brief": value} for value in values]
    for wrong in (*wrongs, {"no name": 1}, {1: 1}, {"b" * 65: 1}):
        text = refused(lambda wrong=wrong: render_prompt(found, "w5", wrong))
        assert text.startswith("chat_template_kwargs: ") and "must be a name that" in text
    for name in ("messages", "add_generation_prompt", "pad_token", "loop", "true", "breif"):
        text = refused(lambda name=name: render_prompt(found, "w5", {name: 1}))
        assert text.startswith(f"chat_template_kwargs: the target's chat template has no '{name}'")
    found.chat_template_kwargs = {"brief": True}
    rendered = [render_prompt(found, "w5", told)[0] for told in (None, {"brief": False})]
    assert rendered == [9, 8]


def test_what_a_template_is_told_counts_where_its_roles_are_looked_at():
    told = {"heard": True}
    found = tokenizer("{% if not heard %}{{ raise_exception('Say.') }}{% endif %}" + TEMPLATE)
    assert render_prompt(found, said("system w9", "user w5"), told) == [3, 9, 1, 5, 2]
    found = tokenizer("{% if heard %}" + NO_SYSTEM + "{% else %}" + TEMPLATE + "{% endif %}")
    assert render_prompt(found, said("system w9", "user w5")) == [3, 9, 1, 5, 2]
    text = refused(lambda: render_prompt(found, said("system w9", "user w5"), told))
    assert text.startswith("messages: the target's chat template knows no system role")


def test_tokens_that_are_named_special_forge_no_turn():
    """Also those that were added as ordinary ones."""
    found = tokenizer(TEMPLATE.replace("w1 {{", "<|user|> {{"))
    found.add_tokens(["<|user|>"])
    found.eos_token = "<|user|>"
    (marker,) = found.convert_tokens_to_ids(["<|user|>"])
    assert render_prompt(found, said("user w5 <|user|> w6")).count(marker) == 1


def test_a_tokenizer_that_cannot_tell_special_tokens_from_text_says_so():
    slow, messages = ByT5Tokenizer(), said("user a </s> b")
    slow.chat_template = "{{ messages[0]['content'] }}"
    assert "set target.reads_markers=true" in refused(lambda: render_prompt(slow, messages))


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
        (said("system w9", "user w5"), UNHEARD, "messages: the target's chat template knows no"),
        (said("human w9", "user w5"), TEMPLATE, "messages: the target's chat template knows no"),
        (said("human w9"), UNHEARD, "messages: the target's chat template knows no human role"),
    ],
)
def test_messages_that_cannot_be_rendered_end_with_one_sentence(messages, template, expected):
    assert refused(lambda: render_prompt(tokenizer(template), messages)).startswith(expected)


def test_every_answer_of_a_conversation_is_supervised():
    asked = said("system w9", "user w5", "assistant w6 w7", "user w8")
    sample = render_sample(tokenizer(), asked, "w10")
    assert sample.ids == [3, 9, 1, 5, 2, 6, 7, 4, 1, 8, 2, 10, 4]
    assert sample.supervised == [(5, 8), (11, 13)] and sample.prompt_length == 11
    assert collate([sample]).supervised[0].nonzero()[:, 0].tolist() == [5, 6, 7, 11, 12]
    check_generation_markers(tokenizer(), asked, "w10")


def test_markers_that_leave_an_earlier_answer_out_are_refused():
    last = TEMPLATE.replace(
        "{% else %}{% generation %}",
        "{% elif not loop.last %}{{ message['content'] }} w4 {% else %}{% generation %}",
    )
    check_generation_markers(tokenizer(last), "w5", "w6")
    asked = said("user w5", "assistant w6", "user w8")
    spaced = last.replace("{% generation %}", "{%- generation -%}")
    for template in (last, spaced, {"default": last, "tool_use": NO_SYSTEM}):
        found = tokenizer(template)
        text = refused(lambda found=found: check_generation_markers(found, asked, "w10"))
        assert "disagree about which tokens are supervised" in text


def test_a_template_that_changes_earlier_turns_is_refused():
    forgetful = TEMPLATE.replace(
        "{% else %}{% generation %}{{ message['content'] }}",
        "{% else %}{% generation %}{{ message['content'] if loop.last else 'w0' }}",
    )
    asked = said("user w5", "assistant w6", "user w8")
    found = refused(lambda: render_sample(tokenizer(forgetful), asked, "w10"))
    assert "renders a prompt differently once" in found


def test_streams_do_not_look_beyond_the_end_of_an_answer():
    """Between two answers there is one token; the second stream must not predict over it."""
    batch = collate([Sample([5, 6, 7, 8, 9], 3, ((1, 2),))])
    labels = future_tokens(batch, 3)
    assert labels.next_tokens.tolist() == [[6, 8, 9]]
    none = NO_LABEL
    assert labels.tokens.tolist() == [[[none] * 3, [9, none, none], [none] * 3]]


@pytest.mark.parametrize(
    "name", [path.stem for path in TARGETS.glob("*.yaml") if "chat_template: |" in path.read_text()]
)
def test_the_templates_of_the_configs_take_conversations_with_a_system_message(name):
    tokenizer = AutoTokenizer.from_pretrained(locate("slipstream/small-target"))
    tokenizer.chat_template = OmegaConf.load(TARGETS / f"{name}.yaml").chat_template
    tokenizer.bos_token = "<|pad|>"
    asked = said("system Be brief.", "user One?", "assistant Two.", "user Three?")
    check_generation_markers(tokenizer, asked, "Four.")
    sample = render_sample(tokenizer, asked, "Four.")
    assert len(sample.supervised) == 2
    for (start, stop), answer in zip(sample.supervised, ("Two.", "Four."), strict=True):
        assert answer in tokenizer.decode(sample.ids[start:stop])
    assert "Be brief." in tokenizer.decode(sample.ids[: sample.supervised[0][0]])
    # without a system message everything is as it was
    assert "Be brief." not in tokenizer.decode(render_prompt(tokenizer, asked[1:]))


def test_without_a_template_an_answer_ends_with_the_end_token_if_there_is_one():
    bare = tokenizer(None)
    assert render_sample(bare, "w5", "w6") == Sample([5, 6], 1)
    bare.eos_token = "w4"
    assert render_sample(bare, "w5", "w6") == Sample([5, 6, 4], 1)
