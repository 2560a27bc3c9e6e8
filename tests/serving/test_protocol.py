"""Requests checked without a server: which further options pass, and which are refused by name."""

import json

import pytest

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.serving.jobs import Told
from slipstream.serving.protocol import (
    NEUTRAL,
    ApiError,
    ChatRequest,
    CompletionRequest,
    Shape,
    parsed,
)

ASKED = {ChatRequest: {"messages": [{"role": "user", "content": "x"}]}}
ASKED[CompletionRequest] = {"prompt": "x"}


def jobs(kind, **options) -> list:
    """What is made of a request with these options."""
    asked = parsed(kind, json.dumps(ASKED[kind] | options).encode())
    return asked.jobs("mine", Sampling(), Limits(6))


@pytest.mark.parametrize("kind", ASKED)
def test_options_that_ask_for_nothing_pass(kind):
    assert jobs(kind) and jobs(kind, **NEUTRAL) and jobs(kind, **dict.fromkeys(NEUTRAL))
    assert jobs(kind, presence_penalty=0.0, repetition_penalty=1.0, anything=None)
    harmless = dict(user="me", metadata={"a": "b"}, store=True, service_tier="auto")
    assert jobs(kind, **harmless, parallel_tool_calls=False, generation_config="{}")
    assert jobs(kind, tools=[], tool_choice="none", function_call="none")
    assert [jobs(kind, seed=seed)[0].seed for seed in (-(2**63), 2**63 - 1)]
    assert jobs(kind, stream_options={"include_usage": None})
    assert jobs(kind, stream_options={"include_usage": True, "include_obfuscation": False})
    assert [job.sampling.top_k for job in jobs(kind, top_k=-1) + jobs(kind, top_k=5)] == [None, 5]


def test_chats_tell_the_template_its_arguments():
    told = {"enable_thinking": False, "effort": "low", "most": 3}
    (job,) = jobs(ChatRequest, chat_template_kwargs=told)
    assert job.arguments == told
    assert jobs(ChatRequest)[0].arguments is None
    assert jobs(CompletionRequest, chat_template_kwargs={})[0].arguments is None
    many = {f"a{n}": n for n in range(17)}
    for wrong in ({"a": [1]}, {"a": None}, {"a": "<|user|>"}, {"a": "b" * 65}, many):
        with pytest.raises(ApiError, match="chat_template_kwargs"):
            jobs(ChatRequest, chat_template_kwargs=wrong)
    with pytest.raises(ApiError, match="chat_template_kwargs: this server has no such option"):
        jobs(CompletionRequest, chat_template_kwargs=told)


def test_a_list_of_prompts_has_the_choices_of_each():
    for prompts in (["x", "y"], [[1, 2], [3]], ["x", [3]]):
        body = json.dumps({"prompt": prompts, "n": 2, "seed": 5, "return_token_ids": True})
        asked = parsed(CompletionRequest, body.encode())
        found = asked.jobs("mine", Sampling(), Limits(6))
        assert [job.prompt for job in found] == [prompts[0], prompts[0], prompts[1], prompts[1]]
        assert [job.seed for job in found] == [5, 6, 5, 6]
    shape = Shape(asked, "mine", 4)
    for index, tokens in enumerate((7, 7, 2, 2)):
        shape.take(index, Told(finish_reason="stop", prompt_tokens=tokens, ids=(index,)))
    assert shape.usage()["prompt_tokens"] == 9
    assert [choice["token_ids"] for choice in shape.whole()["choices"]] == [[0], [1], [2], [3]]
    assert [job.prompt for job in jobs(CompletionRequest, prompt=[1, 2])] == [[1, 2]]


def test_no_more_prompts_are_taken_than_an_answer_could_have():
    with pytest.raises(ApiError, match=r"^prompt: ") as said:
        jobs(CompletionRequest, prompt=["x"] * 50_000, n=16)
    assert said.value.status == 400
    assert len(jobs(CompletionRequest, prompt=[5] * 500)[0].prompt) == 500


def test_what_a_template_reads_of_parts_and_developers():
    parts = [{"type": "text", "text": text} for text in ("Sum up", "this")]
    (job,) = jobs(ChatRequest, messages=[{"role": "developer", "content": parts}])
    assert job.prompt == [{"role": "system", "content": "Sum up\nthis"}]
    (job,) = jobs(ChatRequest, messages=[{"role": "user", "content": []}])
    assert job.prompt == [{"role": "user", "content": ""}]


def test_answers_may_go_on_beyond_their_end():
    assert jobs(CompletionRequest, ignore_eos=True)[0].limits.end_ids == frozenset()
    assert jobs(CompletionRequest, ignore_eos=False)[0].limits.end_ids is None


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 5.0},
        {"min_p": 0.9},
        {"min_tokens": 10},
        {"stop_token_ids": [5]},
        {"modalities": ["audio"]},
        {"tool_choice": "required"},
        {"logprobs": True},
        {"logprobs": 0},
        {"echo": 1},
        {"n\new": 1},
    ],
)
def test_options_that_would_matter_are_refused_by_name(given):
    with pytest.raises(ApiError, match="this server has no such option") as refused:
        jobs(CompletionRequest, **given)
    name = json.dumps(*given)[1:-1]
    assert refused.value.status == 400 and refused.value.param == name
    assert str(refused.value).startswith(f"{name}: ") and "\n" not in str(refused.value)


def test_a_misspelt_option_is_told_the_right_name():
    for kind, name in ((ChatRequest, "max_token"), (CompletionRequest, "max_completion_tokens")):
        with pytest.raises(ApiError, match=f"^{name}: .*; did you mean 'max_tokens'?"):
            jobs(kind, **{name: 3})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"stop": ["a", ""]}, "stop.1: String should have at least 1 character"),
        ({"stop": ["a"] * 17}, "stop: List should have at most 16 items"),
        ({"stop": ""}, "stop: String should have at least 1 character"),
        ({"stop": 5}, "stop: should be a valid string"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options: should be a valid boolean"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type: should be 'text'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "", "a": 1}]}]},
            "messages.0.content.0.a: this server has no such option; known are text, type",
        ),
        (
            {"stream_options": {"include_use": True}},
            "stream_options.include_use: this server has no such option; did you mean",
        ),
    ],
)
def test_what_is_wrong_in_a_list_is_said_of_the_list(options, sentence):
    with pytest.raises(ApiError) as refused:
        jobs(ChatRequest, **options)
    assert str(refused.value).startswith(sentence)


def test_fields_of_messages_are_refused_unless_they_ask_for_nothing():
    """A conversation without its tool calls would be another one."""
    answer = {"role": "assistant", "content": "", "refusal": None, "annotations": []}
    assert jobs(ChatRequest, messages=[answer | {"name": "me", "tool_calls": []}])
    for field, value in (("tool_calls", [{"id": "1"}]), ("tool_call_id", "1"), ("contnt", "x")):
        with pytest.raises(ApiError, match=f"^messages.1.{field}: this server has no such option"):
            jobs(ChatRequest, messages=[answer, answer | {field: value}])


def test_chunks_have_no_usage_but_the_last_one():
    for told in (False, True):
        body = ASKED[ChatRequest] | {"stream_options": {"include_usage": told}}
        shape = Shape(parsed(ChatRequest, json.dumps(body).encode()), "mine", 1)
        for chunk in (shape.opening(0), shape.chunk(0, Told(text="a"))):
            assert ("usage" in chunk) == told and chunk.get("usage") is None
        assert shape.last_chunk()["usage"]["total_tokens"] == 0
        assert "usage" in shape.whole()
