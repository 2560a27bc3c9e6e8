"""Running text as prompts and completions, through `datasets` itself, from a local file."""

import json

import pytest

from slipstream.core.errors import InputError
from slipstream.data.hub import TextSource
from slipstream.data.rows import Row

TEXTS = ["one two three four five", "only two", "a b c", "six  seven\neight nine", "x y z w v u"]


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"summary": text}) + "\n" for text in TEXTS))
    splits = {"train": [0, 3], "validation": [3, 2]}
    return dict(
        name="json", text="summary", source="texts", prompt_words=2, completion_words=2,
        texts=splits, data_files=str(path),
    )  # fmt: skip


def test_the_first_words_are_the_prompt_and_the_next_the_completion(source):
    assert TextSource(**source).rows("train") == [
        Row("one two", " three four", "texts"),
        Row("a b", " c", "texts"),
    ]


def test_splits_share_no_text(source):
    assert TextSource(**source).rows("validation") == [
        Row("six seven", " eight nine", "texts"),
        Row("x y", " z w", "texts"),
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(prompt_words=9), "no text of texts has more than 9 words"),
        (dict(text="title"), "could not be loaded .KeyError"),
        (dict(data_files="missing.jsonl"), "could not be loaded"),
        (dict(texts={}), "texts has no train split"),
        (dict(prompt_words=0), "prompt_words: must be a whole number, at least 1"),
    ],
)
def test_what_cannot_be_used_ends_with_one_sentence(source, changes, expected):
    with pytest.raises(InputError, match=expected) as caught:
        TextSource(**(source | changes)).rows("train")
    assert "\n" not in str(caught.value)
