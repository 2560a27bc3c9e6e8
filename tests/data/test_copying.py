"""Rows that ask for a text to be repeated."""

from tests.commands import config_of

from slipstream.configuration import build
from slipstream.data.rows import Row
from slipstream.data.sources import FORMS, copying_rows

ROWS = [Row("Redwood has area[riverside],", "no", "a"), Row("Who is Bob Lilly ?", "no", "b")]


def test_the_answer_is_the_text_in_the_form_asked_for():
    made = copying_rows(ROWS, 60, seed=0)
    words = {word for row in ROWS for word in row.prompt.split()}
    assert len(made) == 60 and {row.prompt.split(":")[0] for row in made} == set(FORMS)
    for row in made:
        instruction, text = row.prompt.split(": ", 1)
        assert set(text.split()) <= words and 3 <= len(text.split()) <= 20
        assert row.completion == FORMS[instruction](text)
    assert any(row.completion == row.completion.lower() for row in made)


def test_they_depend_on_the_seed_alone():
    assert copying_rows(ROWS, 9, 1) == copying_rows(ROWS, 9, 1) != copying_rows(ROWS, 9, 2)


def test_they_join_the_training_split_alone():
    counts = {
        (split, copies): len(
            build(config_of("train", f"data.copying_rows={copies}").data).rows(split)
        )
        for split in ("train", "validation")
        for copies in (0, 7)
    }
    assert counts["train", 7] == counts["train", 0] + 7
    assert counts["validation", 7] == counts["validation", 0]
