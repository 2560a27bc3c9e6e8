"""The prompts that are decoded: of files, of the hub, or generated."""

import json

import pytest

from slipstream.core.errors import InputError
from slipstream.data.rows import HubSource, Row
from slipstream.evaluation.prompts import PromptSets


class Hub(HubSource):
    def rows(self, split: str) -> list[Row]:
        return [Row(f"{split} {n // 2}", f"{n}", self.source) for n in range(6)]


HUB = {name: Hub("owner/set", "", "", name) for name in ("a", "b")}


def test_prompts_of_the_hub_come_in_turn_once_each_with_all_their_references():
    found = PromptSets(None, HUB, None, "test", 0).take(4)
    assert [(prompt.source, prompt.text, prompt.references) for prompt in found] == [
        ("a", "test 0", ("0", "1")),
        ("b", "test 0", ("0", "1")),
        ("a", "test 1", ("2", "3")),
        ("b", "test 1", ("2", "3")),
    ]


def test_a_path_wins_over_the_hub_and_the_split_is_that_asked_for(tmp_path):
    for split in ("test", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"prompt": split}))
        assert PromptSets(str(tmp_path), HUB, None, split, 0).take(1)[0].text == split
        assert PromptSets(None, HUB, None, split, 0).take(1)[0].text == f"{split} 0"


def test_a_split_that_is_trained_on_is_refused():
    with pytest.raises(InputError, match="must be test or validation"):
        PromptSets(None, HUB, None, "train", 0)
