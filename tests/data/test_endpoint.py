"""Answers of an OpenAI-compatible server, of which there is a stub in this file."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.commands import refused
from tests.data.test_regeneration import chatting_target, content, said
from urllib3.util import Retry

from slipstream.core.errors import InputError
from slipstream.data import endpoint
from slipstream.data.regeneration import Regeneration
from slipstream.data.rendering import render_prompt

KEY = "not-to-be-told"


class Server(ThreadingHTTPServer):
    """Answers with the last word of the tokens it is asked, and the next one; the third time it is
    busy.

    `asked`: paths, keys and bodies; `status`: what it answers instead, if anything; `refused`: to
    prompts with one of these tokens it answers 400; `told`: further fields of its answers.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.status, self.content = [], None, None
        self.refused, self.told = set(), {}
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.asked.append((self.path, self.headers.get("Authorization"), body))
        busy = len(server.asked) == 3
        number = next(token for token in reversed(body["prompt"]) if token > 4)
        choice = {"text": f"w{number} w{number + 1}"}
        choice["finish_reason"] = "length" if number > 30 else "stop"
        sent = server.content or json.dumps({"choices": [choice | server.told]})
        refused = 400 if server.refused & {*body["prompt"]} else None
        self.send_response(server.status or refused or (503 if busy else 200))
        self.send_header("Retry-After", "3600")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent.encode())

    def log_message(self, *_):
        """Says nothing."""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(endpoint, "RETRIES", endpoint.RETRIES.new(backoff_factor=0))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("STUB_KEY", KEY)
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(server, folder, prompts, template=True, **settings):
    target = chatting_target()
    if not template:
        target.tokenizer.chat_template = None
    given = dict(endpoint=server.url, model="served", concurrency=3, key_variable="STUB_KEY")
    how = Regeneration(**given | settings)
    return how.samples(target, target.tokenizer, prompts, 8, folder, seed=0)


def test_conversations_are_answered_by_the_server(server, tmp_path):
    turns = [["w10"], ["w12", "w20"], ["w31"], ["w33", "w9"], ["w14", "w15", "w16"]]
    prompts = [
        said(*(f"{role} {word}" for word in words for role in ("user", "assistant")))[:-1]
        for words in turns
    ]
    found = ask(server, tmp_path, prompts, temperature=[0.5])
    assert [sample.ids for sample in found] == [
        [1, 10, 2, 10, 11, 4],
        [1, 12, 2, 12, 13, 4, 1, 20, 2, 20, 21, 4],
        [1, 31, 2, 31, 32],  # cut at the limit: no end is learned, and nothing follows
        [1, 33, 2, 33, 34],
        [1, 14, 2, 14, 15, 4, 1, 15, 2, 15, 16, 4, 1, 16, 2, 16, 17, 4],
    ]
    assert [len(sample.supervised) for sample in found] == [1, 2, 1, 1, 3]
    assert len(server.asked) == 8 + 1  # the server was busy once
    path, key, body = server.asked[0]
    assert (path, key) == ("/v1/completions", f"Bearer {KEY}")
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("served", 8, 0.5)
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (
        1,
        -1,
        0,
        1,
    )
    for file in tmp_path.iterdir():
        assert KEY not in file.read_text()
    server.asked.clear()
    assert ask(server, tmp_path, prompts, temperature=[0.5]) == found and not server.asked


def test_the_server_reads_what_the_target_would_whatever_template_it_has(server, tmp_path):
    (chat,) = ask(server, tmp_path, ["w5"])
    (text,) = ask(server, tmp_path, ["w5 w6"], template=False)
    assert text.ids == [5, 6, 6, 7, 4] and text.prompt_length == 2
    assert [body["prompt"] for *_, body in server.asked[:2]] == [chat.prompt, text.prompt]
    assert chat.prompt == render_prompt(chatting_target().tokenizer, "w5") == [1, 5, 2]


def test_answers_of_before_an_error_are_kept(server, tmp_path, monkeypatch):
    prompts = [f"w{number}" for number in range(5, 25)]
    whole = ask(server, tmp_path / "whole", prompts)
    split, count = endpoint.text_ids, []

    def failing(*given):
        count.append(1)
        if len(count) == 8:
            server.status = 403
        return split(*given)

    monkeypatch.setattr(endpoint, "text_ids", failing)
    found = refused(lambda: ask(server, tmp_path / "parts", prompts))
    assert found.startswith(f"data.regeneration.endpoint: {server.url}/completions answered")
    assert "status 403;" in found and KEY not in found
    (part,) = (tmp_path / "parts").iterdir()
    done = len(part.read_text().splitlines())
    assert 0 < done < 20
    server.status = None
    server.asked = server.asked[:3]
    assert ask(server, tmp_path / "parts", prompts) == whole
    assert len(server.asked) == 3 + 20 - done
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


def test_prompts_that_the_server_refuses_are_left_out_unless_it_refuses_all(
    server, tmp_path, caplog
):
    prompts = [f"w{number}" for number in range(5, 15)]
    whole = ask(server, tmp_path / "whole", prompts)
    server.refused = {7, 12}
    found = ask(server, tmp_path / "parts", prompts)
    assert found == [sample for sample in whole if not server.refused & {*sample.prompt}]
    assert "left out 2 prompts" in caplog.text and "status 400 (" in caplog.text
    assert "did not end" not in caplog.text
    server.asked.clear()
    assert ask(server, tmp_path / "parts", prompts) == found and len(server.asked) == 2
    server.refused = set()  # mended
    assert ask(server, tmp_path / "parts", prompts) == whole
    server.refused = {7, 12}
    assert "status 400 (" in refused(lambda: ask(server, tmp_path / "none", ["w7", "w12"]))


def test_the_last_turn_of_a_single_conversation_may_be_refused(server, tmp_path):
    server.refused = {20}
    found = ask(server, tmp_path, [said("user w10", "assistant w1", "user w20")])
    assert [sample.ids for sample in found] == [[1, 10, 2, 10, 11, 4]]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"token_ids": [20, 4]}, [20, 4]),
        ({"token_ids": [20]}, [20, 4]),
        ({"token_ids": [20, 10**6]}, [10, 11, 4]),
        ({"finish_reason": "abort"}, [10, 11]),
        ({"finish_reason": None, "token_ids": [20]}, [20]),
    ],
)
def test_tokens_are_the_servers_own_and_end_where_it_says_so(server, tmp_path, told, expected):
    server.told = told
    (sample,) = ask(server, tmp_path, [said("user w10")])
    assert sample.ids[sample.prompt_length :] == expected
    assert server.asked[0][2]["return_token_ids"] is True


def test_what_others_were_asked_already_is_kept_after_an_error(server, tmp_path, monkeypatch):
    ask_one, failed = endpoint.Endpoint._ask, threading.Event()

    def slow(own, session, question):
        if 5 in question.ids:
            failed.set()
            raise InputError("the first one fails")
        failed.wait(60)
        time.sleep(0.2)
        return ask_one(own, session, question)

    monkeypatch.setattr(endpoint.Endpoint, "_ask", slow)
    prompts = [f"w{number}" for number in range(5, 25)]
    assert refused(lambda: ask(server, tmp_path, prompts)) == "the first one fails"
    (part,) = tmp_path.iterdir()
    assert 2 <= len(part.read_text().splitlines()) < 5


def test_no_more_tokens_are_asked_for_than_the_context_holds(server, tmp_path):
    target = chatting_target()
    target.max_positions = 7
    how = Regeneration(endpoint=server.url, model="served")
    (sample,) = how.samples(target, target.tokenizer, ["w5"], 8, tmp_path, seed=0)
    assert server.asked[0][2]["max_tokens"] == 7 - sample.prompt_length


def test_a_server_that_is_busy_for_good(server, tmp_path):
    server.status = 503
    found = refused(lambda: ask(server, tmp_path, ["w5"]))
    assert "with status 503" in found
    assert len(server.asked) == 1 + endpoint.RETRIES.total


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"choices": []}'])
def test_what_is_no_answer_ends_with_one_sentence(server, tmp_path, content):
    server.content = content
    found = refused(lambda: ask(server, tmp_path, ["w5"]))
    assert found.startswith("data.regeneration.endpoint: ") and "gave no answer" in found


def test_no_server_and_no_key(server, tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "RETRIES", Retry(0))
    found = refused(lambda: ask(server, tmp_path, ["w5"], endpoint="http://127.0.0.1:1/v1"))
    assert found.startswith("data.regeneration.endpoint: http://127.0.0.1:1/v1/completions")
    found = refused(lambda: ask(server, tmp_path, ["w5"], key_variable="NO_SUCH_KEY"))
    assert found.startswith("data.regeneration.key_variable: ")


def test_a_server_that_asks_for_no_key(server, tmp_path):
    ask(server, tmp_path, ["w5"], key_variable=None)
    assert server.asked[0][1] is None


def test_an_answer_ends_as_the_template_has_it(server, tmp_path, monkeypatch):
    """Which need not be with the end token of the tokenizer: Phi-3 ends turns with another one."""
    target = chatting_target()
    target.tokenizer.add_special_tokens({"eos_token": "w3"})
    target.tokenizer.add_special_tokens({"additional_special_tokens": ["w4"]})
    monkeypatch.setattr("tests.data.test_endpoint.chatting_target", lambda: target)
    (sample,) = ask(server, tmp_path, [said("user w10")])
    assert sample.ids[-3:] == [10, 11, 4]
