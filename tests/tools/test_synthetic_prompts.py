"""Invented prompts: form, determinism, splits that share none; and those that ship are theirs."""

import gzip
import re
from itertools import islice
from random import Random

import pytest
from tools.synthetic import KINDS, SHIPPED, SPLITS, invented, lines_of, split_of, write
from tools.synthetic.columns import (
    NUMBER_NOUNS,
    OTHERS,
    SPORTS,
    TEXT_NOUNS,
    Column,
    parse_column,
)
from tools.synthetic.grammar import Grammar, parse_pattern, parse_rules
from tools.synthetic.questions import FRAMES, ask
from tools.synthetic.values import VALUES
from tools.synthetic.wording import Condition, Intent, Wording, listed, plural

from slipstream.assets import PROMPTS

SLOTS = "name, eatType, food, priceRange, customer rating, area, familyFriendly, near"
FILES = [(kind, split) for kind in KINDS for split in SPLITS]


def prompts(kind: str, count: int, seed: int, split: str = "train") -> list[str]:
    return list(islice(invented(kind, split, seed), count))


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


def test_prompts_are_deterministic_and_distinct():
    for kind in KINDS:
        some = prompts(kind, 1000, 5)
        assert some == prompts(kind, 1000, 5) and len(set(some)) == 1000


def test_other_seeds_give_nearly_disjoint_prompts():
    for kind in KINDS:
        assert len(set(prompts(kind, 1000, 1)) & set(prompts(kind, 1000, 2))) < 5


def test_splits_never_share_a_prompt():
    for kind, split in FILES:
        assert all(split_of(prompt) == split for prompt in prompts(kind, 150, 7, split))
    assert sorted(number for numbers in SPLITS.values() for number in numbers) == list(range(100))


def test_the_split_of_a_prompt_stays_for_good():
    assert [split_of(text) for text in "abo"] == ["test", "train", "validation"]


def test_data_to_text_has_the_slots_of_the_task_in_their_order():
    counts = []
    for prompt in prompts("data_to_text", 1000, 0):
        assert re.fullmatch(r"[\w ]+\[[^\[\]]+\](, [\w ]+\[[^\[\]]+\])*", prompt)
        slots = re.findall(r"([\w ]+)\[", prompt.replace(", ", ","))
        assert slots == [slot for slot in SLOTS.split(", ") if slot in slots]
        assert slots[0] == "name"
        counts.append(len(slots))
    assert min(counts) >= 3 and max(counts) == 8 and 5 < sum(counts) / 1000 < 6


def test_text_to_sql_has_a_table_and_a_question():
    pattern = r"CREATE TABLE table_[12]_\d{5,8}_\d+ \((.*)\)\nQuestion: (\S.+\S)"
    counts = []
    for prompt in prompts("text_to_sql", 1000, 0):
        columns = re.fullmatch(pattern, prompt)[1].split(", ")
        names = [column.split(" ")[0] for column in columns]
        assert all(re.fullmatch(r"[a-z]\w* (VARCHAR|INTEGER)", column) for column in columns)
        assert len(set(names)) == len(names)
        assert not re.search(r"[{}]|None|  ", prompt)
        counts.append(len(names))
    assert 4.5 < sum(counts) / 1000 < 5


def shipped(kind: str, split: str) -> bytes:
    return gzip.decompress((PROMPTS / kind / f"{split}.jsonl.gz").read_bytes())


@pytest.mark.parametrize(("kind", "split"), FILES)
def test_the_shipped_prompts_begin_as_they_are_invented(kind, split):
    assert shipped(kind, split).startswith(lines_of(kind, split, 100, 0))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "split"), FILES)
def test_the_shipped_prompts_are_those_that_are_invented(kind, split):
    assert shipped(kind, split) == lines_of(kind, split, SHIPPED[split], 0)


def test_a_file_depends_on_its_arguments_alone(tmp_path):
    for name in ("first", "second"):
        write(tmp_path / name, {"test": 5}, 3)
    for kind in KINDS:
        first, second = (tmp_path / name / kind / "test.jsonl.gz" for name in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()
        assert gzip.decompress(first.read_bytes()) == lines_of(kind, "test", 5, 3)
