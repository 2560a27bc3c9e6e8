"""`python serve.py` through the `openai` client: answers, streams, many at once, and their ends."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import psutil
import pytest
from tests.serving.conftest import PLACES

from slipstream import generate
from slipstream.assets import PROMPTS
from slipstream.data.rendering import render_prompt
from slipstream.data.rows import read_rows
from slipstream.targets.loading import load_target

TEXTS = [
    row.prompt
    for kind in ("data_to_text", "text_to_sql")
    for row in read_rows(PROMPTS / kind, "test", False)[:8]
]


def of_user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def ask(server, text: str, **options):
    client, options = server.client(), {"model": "slipstream", **options}
    return client.chat.completions.create(messages=of_user(text), **options)


@pytest.fixture(scope="module")
def alone():
    """The answers of the library, one prompt at a time, of 8 to 20 tokens."""
    return {text: generate(text, max_new_tokens=size_of(text)) for text in TEXTS}


def size_of(text: str) -> int:
    return 8 + len(text) % 13


def test_an_answer_is_the_librarys_with_its_counts(server, alone):
    for text in (TEXTS[0], TEXTS[8]):
        found, expected = ask(server, text, max_tokens=size_of(text)), alone[text]
        (choice,) = found.choices
        assert choice.message.content == expected.text and choice.message.role == "assistant"
        reasons = {"end": "stop", "length": "length"}
        assert choice.finish_reason == reasons[expected.finished]
        usage = found.usage
        assert usage.completion_tokens == len(expected.ids)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        details, statistics = usage.completion_tokens_details, expected.statistics
        assert details.accepted_prediction_tokens == statistics.drafted
        rows = statistics.target_rows - statistics.target_forwards
        assert details.rejected_prediction_tokens == rows - statistics.drafted
        assert found.model == "slipstream" and found.id.startswith("chatcmpl-")


def test_streamed_pieces_add_up_to_the_answer(server, alone):
    text = TEXTS[1]
    options = dict(max_tokens=size_of(text), stream=True, stream_options={"include_usage": True})
    chunks = list(ask(server, text, **options))
    *pieces, last = chunks
    assert "".join(each.choices[0].delta.content or "" for each in pieces) == alone[text].text
    assert pieces[0].choices[0].delta.role == "assistant" and len(pieces) > 3
    assert [each.choices[0].finish_reason for each in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].choices[0].finish_reason in ("stop", "length")
    assert last.choices == [] and last.usage.completion_tokens == len(alone[text].ids)
    assert len({each.id for each in chunks}) == 1


def test_many_at_once_are_each_answered_as_alone(server, alone):
    before, asked = server.counts(), TEXTS * 2
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda text: ask(server, text, max_tokens=size_of(text)), asked))
    assert len(found) == 32 > 2 * 8  # which are answered together
    for text, own in zip(asked, found, strict=True):
        assert own.choices[0].message.content == alone[text].text, text
    assert server.quiet()
    after = server.counts()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    usages = [own.usage for own in found]
    assert grown["prompt_tokens_total"] == sum(each.prompt_tokens for each in usages)
    assert grown["generation_tokens_total"] == sum(each.completion_tokens for each in usages)
    proposed = sum(
        each.completion_tokens_details.accepted_prediction_tokens
        + each.completion_tokens_details.rejected_prediction_tokens
        for each in usages
    )
    assert grown["spec_decode_num_draft_tokens_total"] == proposed > 0
    accepted = grown["spec_decode_num_accepted_tokens_total"]
    by_position = [grown[name] for name in grown if "per_pos" in name]
    assert accepted == sum(by_position) and by_position == sorted(by_position, reverse=True)
    assert grown["spec_decode_num_drafts_total"] >= by_position[0]


def test_the_first_token_comes_while_others_are_answered(server):
    first = ask(server, TEXTS[2], max_tokens=400, stop=["\0"], temperature=1.5, stream=True)
    next(first), next(first)
    second = ask(server, TEXTS[3], max_tokens=2, stream=True)
    assert next(second) and server.counts()["num_requests_running"] >= 1
    list(second)
    assert server.counts()["num_requests_running"] >= 1  # the first one goes on
    first.close()
    assert server.quiet()


def test_stop_strings_are_cut_off(server, alone):
    text = TEXTS[0]
    whole = alone[text].text
    stop = whole[6:9]
    found = ask(server, text, max_tokens=size_of(text), stop=[stop, "never"])
    assert found.choices[0].message.content == whole[: whole.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    pieces = ask(server, text, max_tokens=size_of(text), stop=stop, stream=True)
    streamed = "".join(each.choices[0].delta.content or "" for each in pieces)
    assert streamed == whole[: whole.index(stop)]


def test_the_end_is_said_as_it_was(server):
    cut = ask(server, TEXTS[0], max_completion_tokens=1)
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 1
    whole = ask(server, TEXTS[0], max_tokens=200)
    assert whole.choices[0].finish_reason == "stop" and whole.usage.completion_tokens < 200


def test_choices_have_seeds_of_their_own_and_a_seed_is_repeatable(server):
    options = dict(temperature=1.0, top_p=0.95, max_tokens=8, seed=5, n=3)
    first, again = (ask(server, TEXTS[4], **options) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1 and [choice.index for choice in first.choices] == [0, 1, 2]
    expected = generate(TEXTS[4], temperature=1.0, top_p=0.95, max_new_tokens=8, seed=6).text
    assert texts[1] == expected
    streamed = {0: "", 1: "", 2: ""}
    for chunk in ask(server, TEXTS[4], stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == texts
    unseeded = {
        ask(server, TEXTS[4], temperature=1.5, max_tokens=6).choices[0].message.content
        for _ in range(4)
    }
    assert len(unseeded) > 1


def test_plain_completions_have_no_chat_template(server):
    found = server.client().completions.create(model="slipstream", prompt="SELECT", max_tokens=8)
    assert found.object == "text_completion" and found.usage.completion_tokens <= 8
    pieces = server.client().completions.create(
        model="slipstream", prompt="SELECT", max_tokens=8, stream=True
    )
    assert "".join(each.choices[0].text for each in pieces) == found.choices[0].text
    assert found.usage.prompt_tokens < ask(server, "SELECT", max_tokens=1).usage.prompt_tokens


def test_a_prompt_may_come_as_its_tokens(server):
    tokenizer = load_target("slipstream/small-target").tokenizer
    ids, chat = render_prompt(tokenizer, TEXTS[0]), ask(server, TEXTS[0], max_tokens=8)
    given = dict(model="slipstream", prompt=ids, max_tokens=8)
    found = server.client().completions.create(**given)
    assert found.choices[0].text == chat.choices[0].message.content
    assert found.usage.prompt_tokens == len(ids) == chat.usage.prompt_tokens
    for wrong in ([], [-1], [len(tokenizer)], [1.5], [["a"]], [[]]):
        with pytest.raises(openai.BadRequestError, match="prompt"):
            server.client().completions.create(**given | {"prompt": wrong})


def test_models_and_health(server):
    (model,) = server.client().models.list().data
    assert model.max_model_len == load_target("slipstream/small-target").max_positions
    assert model.id == "slipstream"
    assert httpx.get(f"{server.url}/health").text == "ok"


def test_it_listens_on_the_loopback_interface_alone(server):
    whole = psutil.Process(server.process.pid)
    listening = {
        connection.laddr.ip
        for process in [whole, *whole.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == "LISTEN"
    }
    assert listening == {"127.0.0.1"}


def go_away(server, number: int) -> None:
    """Start a request, streamed or not, and close the connection in its midst."""
    body = dict(messages=of_user(TEXTS[number % len(TEXTS)]), max_tokens=300, temperature=1.5)
    path = f"{server.url}/v1/chat/completions"
    if number % 2:
        with httpx.stream("POST", path, json={**body, "stream": True}, timeout=60) as response:
            next(response.iter_lines())
        return
    try:
        httpx.post(path, json=body, timeout=0.05 + 0.01 * (number % 7))
    except httpx.TimeoutException:
        return


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_clients_that_go_leave_nothing_behind(server, alone, count):
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda number: go_away(server, number), range(count)))
    assert server.quiet()
    assert server.counts()["request_success_total finished_reason=abort"] > 0
    found = ask(server, TEXTS[5], max_tokens=size_of(TEXTS[5]))
    assert found.choices[0].message.content == alone[TEXTS[5]].text


def test_more_than_can_wait_are_refused_politely(server):
    body = dict(messages=of_user(TEXTS[6]), max_tokens=400, temperature=1.5, n=16)

    def hold() -> None:
        with suppress(httpx.TimeoutException):
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=6)

    with ThreadPoolExecutor(PLACES // 16) as pool:
        for _ in range(PLACES // 16):
            pool.submit(hold)
        counts, deadline = {}, time.monotonic() + 5
        while time.monotonic() < deadline:
            counts = server.counts()
            if counts["num_requests_running"] + counts["num_requests_waiting"] > PLACES - 16:
                break
        assert counts["num_requests_waiting"] > 0
        with pytest.raises(openai.RateLimitError) as refused:
            ask(server, TEXTS[6], max_tokens=1, n=16)
    assert refused.value.body["type"] == "rate_limit_error"
    assert refused.value.body["code"] == "queue_full"
    assert "too many requests are waiting" in refused.value.body["message"]
    assert refused.value.response.headers["retry-after"] == "1"
    assert server.quiet()
    assert len(ask(server, TEXTS[6], max_tokens=1, n=16).choices) == 16


def test_a_client_that_goes_before_its_request_is_whole_is_no_error(server):
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
        time.sleep(0.2)
    time.sleep(0.2)
    assert "Traceback" not in server.log.read_text()
    assert server.quiet()


def test_other_ways_to_ask_wrongly(server):
    path, body = f"{server.url}/v1/chat/completions", json.dumps({"messages": of_user("Hi")})
    plain = httpx.post(path, content=body, headers={"Content-Type": "text/plain"})
    assert plain.status_code == 415 and "application/json" in plain.json()["error"]["message"]
    huge = json.dumps({"messages": of_user("x" * (5 << 20))})
    large = httpx.post(path, content=huge, headers={"Content-Type": "application/json"})
    assert large.status_code == 413
    assert httpx.get(path).json()["error"]["message"].startswith("this path has other methods")
    nowhere = httpx.get(f"{server.url}/v1/nothing")
    assert nowhere.status_code == 404 and "error" in nowhere.json()


def test_the_log_tells_costs_and_no_contents(server):
    ask(server, "Zebra crossing the Zambezi", max_tokens=3)
    time.sleep(0.2)
    text = server.log.read_text()
    assert "chatcmpl-" in text and "tokens" in text and "Zambezi" not in text
    assert "Traceback" not in text, text
