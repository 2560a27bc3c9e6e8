"""Invented prompts: their form, determinism, splits that never share a prompt, bad input."""

import re
from random import Random

import pytest

from slipstream.core.errors import InputError
from slipstream.data.rows import Row
from slipstream.data.synthetic import KINDS, SPLITS, SyntheticPrompts, split_of
from slipstream.data.synthetic.columns import (
    NUMBER_NOUNS,
    OTHERS,
    SPORTS,
    TEXT_NOUNS,
    Column,
    parse_column,
)
from slipstream.data.synthetic.grammar import Grammar, parse_pattern, parse_rules
from slipstream.data.synthetic.questions import FRAMES, ask
from slipstream.data.synthetic.values import VALUES
from slipstream.data.synthetic.wording import Condition, Intent, Wording, listed, plural

SLOTS = "name, eatType, food, priceRange, customer rating, area, familyFriendly, near"
BOTH = ["data_to_text", "text_to_sql"]


def prompts(*args) -> list[str]:
    return [row.prompt for row in SyntheticPrompts(*args).rows()]


def test_grammar_worked_examples():
    assert parse_rules("size = {1-9} cm *2 | tall") == {"size": (["{1-9} cm", "tall"], [2, 3])}
    assert parse_pattern("No. {1-9} {noun}") == ["No. ", (1, 9), " ", "noun", ""]
    grammar = Grammar(
        "line = {greeting}, {name} {7-7}{mark}\ngreeting = Hello *3",
        {"name": ["Ada"]},
        {"mark": lambda rng: "!"},
    )
    assert grammar.draw("line", Random(0)) == "Hello, Ada 7!"
    assert "mark" in grammar and "nothing" not in grammar
    with pytest.raises(KeyError, match="nobody"):
        Grammar("line = {nobody}", {}, {})


def test_column_and_wording_worked_examples():
    assert parse_column("c_1st_leg:goals") == Column("c_1st_leg", "1st leg", "goals")
    assert parse_column("pick_number:rank").header == "Pick #"
    nouns = ["city", "loss", "wins", "day"]
    assert [plural(noun) for noun in nouns] == ["cities", "losses", "wins", "days"]
    assert listed(["x", "y", "z"], ", and ") == "x, y, and z"


def test_every_column_has_values():
    kinds = {column.kind for topic in SPORTS + OTHERS for column in topic.columns}
    kinds |= {noun.split(":")[1] for noun in NUMBER_NOUNS + TEXT_NOUNS}
    assert all(VALUES.draw(kind, Random(0)) for kind in kinds)


def test_every_frame_names_the_column_and_the_value():
    crowd, venue = Column("crowd", "Crowd", "big"), Column("spot", "Spot", "phrase")
    intent = Intent("game", "MAX", crowd, (Condition(venue, "=", "under the bridge"),))
    for frame in FRAMES:
        question = frame(Wording(intent, Random(3))).lower()
        assert "crowd" in question and "under the bridge" in question, frame.__name__
    assert ask(intent, Random(0)) == ask(intent, Random(0))


def test_rows_come_in_turn_and_are_deterministic_and_distinct():
    rows = SyntheticPrompts(BOTH, 2001, 5).rows()
    assert rows == SyntheticPrompts(BOTH, 2001, 5).rows()
    assert [row.source for row in rows[:3]] == ["data_to_text", "text_to_sql", "data_to_text"]
    assert all(row == Row(row.prompt, "", row.source) for row in rows)
    assert len({row.prompt for row in rows}) == 2001
    assert SyntheticPrompts(BOTH, 10, 5).rows() == rows[:10]
    assert {row.prompt for row in rows if row.source == "text_to_sql"} >= set(
        prompts(["text_to_sql"], 1000, 5)
    )


def test_other_seeds_give_nearly_disjoint_prompts():
    first, second = set(prompts(BOTH, 2000, 1)), set(prompts(BOTH, 2000, 2))
    assert len(first & second) < 10


def test_splits_never_share_a_prompt():
    drawn = {split: set(prompts(BOTH, 300, 7, split)) for split in SPLITS}
    assert all(split_of(prompt) == split for split, some in drawn.items() for prompt in some)
    assert sorted(number for numbers in SPLITS.values() for number in numbers) == list(range(100))


def test_the_split_of_a_prompt_stays_for_good():
    assert [split_of(text) for text in "abo"] == ["test", "train", "validation"]


def test_data_to_text_has_the_slots_of_the_task_in_their_order():
    counts = []
    for prompt in prompts(["data_to_text"], 1000, 0):
        assert re.fullmatch(r"[\w ]+\[[^\[\]]+\](, [\w ]+\[[^\[\]]+\])*", prompt)
        slots = re.findall(r"([\w ]+)\[", prompt.replace(", ", ","))
        assert slots == [slot for slot in SLOTS.split(", ") if slot in slots]
        assert slots[0] == "name"
        counts.append(len(slots))
    assert min(counts) >= 3 and max(counts) == 8 and 5 < sum(counts) / 1000 < 6


def test_text_to_sql_has_a_table_and_a_question():
    pattern = r"CREATE TABLE table_[12]_\d{5,8}_\d+ \((.*)\)\nQuestion: (\S.+\S)"
    counts = []
    for prompt in prompts(["text_to_sql"], 1000, 0):
        columns = re.fullmatch(pattern, prompt)[1].split(", ")
        names = [column.split(" ")[0] for column in columns]
        assert all(re.fullmatch(r"[a-z]\w* (VARCHAR|INTEGER)", column) for column in columns)
        assert len(set(names)) == len(names)
        assert not re.search(r"[{}]|None|  ", prompt)
        counts.append(len(names))
    assert 4.5 < sum(counts) / 1000 < 5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((["poems"], 5, 0), "kinds.*poems.*data_to_text, text_to_sql"),
        (([], 5, 0), "kinds"),
        ((["text_to_sql", "text_to_sql"], 5, 0), "kinds.*twice"),
        ((BOTH, 0, 0), "count.*0"),
        ((BOTH, None, 0), "count.*None"),
        ((BOTH, 5, 0, "dev"), "split.*dev.*train, validation, test"),
    ],
)
def test_bad_input_is_named(arguments, sentence):
    with pytest.raises(InputError, match=sentence):
        SyntheticPrompts(*arguments)


def test_all_kinds_are_covered_here():
    assert sorted(KINDS) == sorted(BOTH)
