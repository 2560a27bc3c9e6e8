"""Shipped prompts: their order, other seeds, splits that never share a prompt, bad input."""

import pytest

from slipstream.core.errors import InputError
from slipstream.data.hub import SPLITS
from slipstream.data.rows import Row
from slipstream.data.sources import KINDS, Sources

BOTH = ["data_to_text", "text_to_sql"]


def shipped(kinds, count, seed, split="train") -> list[Row]:
    """As they are added to rows that were given."""
    return Sources(".", None, kinds, seed).synthetic(count, split)


def prompts(*args) -> list[str]:
    return [row.prompt for row in shipped(*args)]


@pytest.mark.parametrize("seed", [0, 5])
def test_rows_come_in_turn_and_are_deterministic_and_distinct(seed):
    rows = shipped(BOTH, 2001, seed)
    assert rows == shipped(BOTH, 2001, seed)
    assert [row.source for row in rows[:3]] == ["data_to_text", "text_to_sql", "data_to_text"]
    assert all(row == Row(row.prompt, "", row.source) for row in rows)
    assert len({row.prompt for row in rows}) == 2001
    assert shipped(BOTH, 10, seed) == rows[:10]
    assert {row.prompt for row in rows if row.source == "text_to_sql"} == set(
        prompts(["text_to_sql"], 1000, seed)
    )


def test_the_first_prompts_stay_for_good():
    first, second = prompts(BOTH, 2, 0)
    assert first == (
        "name[Famenta Kitchen], eatType[pub], food[Italian], priceRange[cheap], "
        "customer rating[1 out of 5], familyFriendly[no]"
    )
    assert second.startswith("CREATE TABLE table_1_22774712_1 (name VARCHAR, ")


def test_other_seeds_give_other_prompts():
    first, second = set(prompts(BOTH, 2000, 1)), set(prompts(BOTH, 2000, 2))
    assert len(first & second) < 400


def test_splits_never_share_a_prompt():
    drawn = [prompt for split in SPLITS for prompt in prompts(BOTH, 2000, 7, split)]
    assert len(set(drawn)) == len(drawn) == 6000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((["poems"], 5, 0), "kinds.*poems.*data_to_text, text_to_sql"),
        (([], 5, 0), "kinds"),
        ((["text_to_sql", "text_to_sql"], 5, 0), "kinds.*twice"),
        ((BOTH, 0, 0), ": 0 prompts were asked for"),
        ((BOTH, None, 0), ": None prompts were asked for"),
    ],
)
def test_bad_input_is_named(arguments, sentence):
    with pytest.raises(InputError, match=sentence):
        shipped(*arguments)


def test_more_than_ship_are_refused_with_what_to_do():
    assert len(prompts(BOTH, 24000, 0)) == 24000
    sentence = "12001 data_to_text.*train.*12000 ship.*python -m tools.synthetic --train 12001"
    with pytest.raises(InputError, match=sentence):
        prompts(["data_to_text"], 12001, 0)


def test_all_kinds_are_covered_here():
    assert sorted(KINDS) == sorted(BOTH)
