"""Rows from the hub: templates, split names and revisions, without a network."""

import json

import datasets
import pytest
from tests.commands import refused

from slipstream.core.errors import InputError
from slipstream.data.hub import HubSource
from slipstream.data.rows import Row, read_rows, text_of


def test_a_hub_source_asks_for_its_own_split_and_fills_its_templates(monkeypatch):
    asked = []

    def load_dataset(name, split, revision):
        asked.append((name, split, revision))
        return [{"question": "How many?", "answer": "SELECT 1"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = HubSource(
        "team/set", "Q: {question}", "{answer}", "sql", {"validation": "train[95%:]"}, "main"
    )
    assert source.rows("validation") == [Row("Q: How many?", "SELECT 1", "sql")]
    source.rows("test")
    assert asked == [("team/set", "train[95%:]", "main"), ("team/set", "test", "main")]


def test_a_hub_that_cannot_be_reached_ends_with_one_sentence(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match=r"could not be loaded .*path=FILE"):
        HubSource("team/set", "{a}", "{b}", "set").rows("train")


@pytest.mark.parametrize(
    "prompt, rows, sentence",
    [
        ("{}", [{"a": "1"}], "could not be loaded .*column names"),
        ("{a.b}", [{"a": "1"}], "could not be loaded .*column names"),
        ("{c}", [{"a": "1"}], "could not be loaded .*column names"),
        ("{a}", [], r"set has no rows in its train\[:0\] split"),
    ],
)
def test_a_template_or_a_split_that_does_not_fit_ends_with_one_sentence(
    monkeypatch, prompt, rows, sentence
):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    with pytest.raises(InputError, match=sentence):
        HubSource("team/set", prompt, "", "set", {"train": "train[:0]"}).rows("train", False)


def bench(tmp_path, *lines):
    folder = tmp_path / "bench"
    folder.mkdir(exist_ok=True)
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return read_rows(folder / "questions.jsonl", "test", completion_required=False)


def test_question_files_are_read_with_their_categories_and_later_turns(tmp_path):
    first = {"question_id": 1, "category": "writing", "turns": ["One?", "Two?"]}
    assert bench(tmp_path, first, {"question_id": 2, "turns": ["Three?"]}) == [
        Row("One?", "", "bench", "writing", ("Two?",)),
        Row("Three?", "", "bench"),
    ]
    with pytest.raises(InputError, match="line 1 has no text field 'prompt'"):
        bench(tmp_path, {"turns": []})
    with pytest.raises(InputError, match="line 1 'turns': every turn must be a text"):
        bench(tmp_path, {"turns": ["One?", 2]})


def test_benchmarks_of_programs_are_read_with_their_solutions(tmp_path):
    mbpp = {"task_id": 2, "text": "Add.", "code": "a + b", "test_list": ["assert 1", "assert 2"]}
    humaneval = {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": " pass"}
    classeval = {"skeleton": "class A:", "class_name": "A", "solution_code": "class A: pass"}
    found = bench(tmp_path, mbpp, humaneval, classeval)
    assert [row.completion for row in found] == ["a + b", " pass", "class A: pass"]
    assert "task: Add. Your code should pass these tests:\n\nassert 1\nassert 2" in found[0].prompt
    assert found[1].prompt == "def f():"
    assert found[2].prompt == "Please complete the class A in the following code.\nclass A:"


def test_conversations_of_sharegpt_and_tasks_of_alpaca_are_read(tmp_path):
    said = [
        ("system", "Be brief."),
        ("human", "One?"),
        ("gpt", "1"),
        ("human", "Two?"),
        ("gpt", "2"),
    ]
    lines = [
        {"id": "a", "conversations": [{"from": who, "value": what} for who, what in said]},
        {"conversations": [dict(role="user", content="One?"), dict(role="assistant", content="1")]},
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"instruction": "Sing.", "input": "", "output": "La."},
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    roles = ["system", "user", "assistant", "user"]
    asked = [dict(role=role, content=text) for role, (_, text) in zip(roles, said, strict=False)]
    found = [(row.prompt, row.completion) for row in read_rows(path, "train")]
    assert found == [
        (asked, "2"), ([dict(role="user", content="One?")], "1"),
        ("Add.\n\n1 and 2", "3"), ("Sing.", "La."),
    ]  # fmt: skip
    nulls = dict.fromkeys(("conversations", "messages", "prompt", "instruction", "turns"))
    path.write_text("\n".join(json.dumps(nulls | line) for line in lines))
    assert [(row.prompt, row.completion) for row in read_rows(path, "train")] == found
    path.write_text(json.dumps({"conversations": [{"from": ["human"], "value": 3}]}))
    assert "messages[0]: it has no text 'content'" in refused(lambda: read_rows(path, "train"))


@pytest.mark.parametrize("who", ["gpt", "chatgpt", "bing", "bard"])
def test_all_that_answer_in_sharegpt_are_the_assistant(tmp_path, who):
    said = [{"from": "human", "value": "One?"}, {"from": who, "value": "1"}]
    (row,) = bench(tmp_path, {"conversations": said})
    assert row == Row([dict(role="user", content="One?")], "1", "bench")


def test_fields_of_a_reader_that_are_named_like_a_benchmarks_change_nothing(tmp_path):
    own = {"prompt": "One?", "later": [1], "turns": "none", "text": 2, "category": 3}
    assert bench(tmp_path, own) == [Row("One?", "", "bench")]
    with pytest.raises(InputError, match="line 1 has no text field 'prompt'"):
        bench(tmp_path, {"text": "Add.", "code": "a + b", "test_list": 5})
    with pytest.raises(InputError, match="line 1 has no text field 'completion'"):
        bench(tmp_path, {"text": "Add.", "code": 1, "test_list": []})


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Four."},
]


def written(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_conversations_are_prompts_with_their_last_answer(tmp_path):
    lines = [{"messages": CONVERSATION}, {"messages": CONVERSATION[:4]}]
    path = written(tmp_path, "\n".join(map(json.dumps, lines)))
    rows = read_rows(path, "train", completion_required=False)
    assert rows == [Row(CONVERSATION[:4], "Four.", "rows"), Row(CONVERSATION[:4], "", "rows")]
    assert text_of(rows[0].prompt) == "Be brief.\nOne?\nTwo.\nThree?"
    found = refused(lambda: read_rows(path, "train"))
    assert "line 2: messages: the last one is not of the assistant" in found


def test_a_conversation_is_read_whole_where_its_first_words_are_named_too(tmp_path):
    """As in UltraChat: the prompt is the first message."""
    row = {"prompt": "One?", "prompt_id": "a", "messages": CONVERSATION[1:]}
    found = read_rows(written(tmp_path, json.dumps(row)), "train", False)
    assert found == [Row(CONVERSATION[1:4], "Four.", "rows")]
    both = json.dumps(row | {"completion": "Two."})
    assert read_rows(written(tmp_path, both), "train") == [Row("One?", "Two.", "rows")]


def test_what_would_not_be_learned_is_refused(tmp_path):
    called = [*CONVERSATION[:4], CONVERSATION[4] | {"tool_calls": [{"name": "f"}]}]
    path = written(tmp_path, json.dumps({"messages": called}))
    assert "the answer has 'tool_calls'" in refused(lambda: read_rows(path, "train"))
    assert read_rows(path, "train", False)  # the target answers itself
    path = written(tmp_path, json.dumps({"messages": CONVERSATION, "tools": [{"name": "f"}]}))
    assert "line 1 has 'tools'" in refused(lambda: read_rows(path, "train", False))
    path = written(tmp_path, json.dumps({"messages": CONVERSATION, "tools": None}))
    assert read_rows(path, "train")


def test_a_set_without_completions_asks_for_the_targets_own():
    source = HubSource("team/set", "{a}", "", "set")
    assert "data.regenerate=true" in refused(lambda: source.rows("train"))


def test_a_system_text_goes_before_the_prompt(tmp_path):
    path = written(tmp_path, '{"system": "Be brief.", "prompt": "One?", "completion": "Two."}')
    assert read_rows(path, "train") == [Row(CONVERSATION[:2], "Two.", "rows")]


def test_a_system_text_goes_before_messages_too(tmp_path):
    """As tables have it whose rows share their columns: those not used are null."""
    row = {"prompt": None, "system": "Be brief.", "messages": CONVERSATION[1:]}
    expected = read_rows(written(tmp_path, json.dumps({"messages": CONVERSATION})), "train", False)
    assert read_rows(written(tmp_path, json.dumps(row)), "train", False) == expected


@pytest.mark.parametrize(
    "messages, expected",
    [
        ([], "line 1: messages: give a list"),
        ("One?", "line 1: messages: give a list"),
        ([{"role": "user"}], "line 1: messages[0]: it has no text 'content'"),
        (CONVERSATION[-1:], "line 1: messages: the only one is an answer to nothing"),
    ],
)
def test_malformed_conversations_end_with_one_sentence(tmp_path, messages, expected):
    path = written(tmp_path, json.dumps({"messages": messages}))
    assert expected in refused(lambda: read_rows(path, "train", completion_required=False))


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_only_line_feeds_end_a_row(tmp_path, separator):
    text = f"one{separator}two"
    lines = [json.dumps({"prompt": text, "completion": text}, ensure_ascii=False)] * 2
    assert read_rows(written(tmp_path, "\r\n".join(lines)), "train") == [
        Row(text, text, "rows"),
        Row(text, text, "rows"),
    ]


def test_a_byte_order_mark_is_accepted(tmp_path):
    content = b"\xef\xbb\xbf" + b'{"prompt": "One?", "completion": "Two."}'
    assert read_rows(written(tmp_path, content), "train") == [Row("One?", "Two.", "rows")]
