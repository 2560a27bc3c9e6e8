"""Rows from the hub: templates, split names and revisions, without a network."""

import json

import datasets
import pytest

from slipstream.core.errors import InputError
from slipstream.data.rows import HubSource, Row, read_rows


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


def test_question_files_are_read_as_their_first_turns(tmp_path):
    folder = tmp_path / "bench"
    folder.mkdir()
    lines = [{"question_id": 1, "turns": ["One?", "Two?"]}, {"question_id": 2, "turns": ["Three?"]}]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = read_rows(folder / "questions.jsonl", "test", completion_required=False)
    assert rows == [Row("One?", "", "bench"), Row("Three?", "", "bench")]
    (folder / "questions.jsonl").write_text(json.dumps({"turns": []}))
    with pytest.raises(InputError, match="line 1 has no text field 'prompt'"):
        read_rows(folder / "questions.jsonl", "test", completion_required=False)
