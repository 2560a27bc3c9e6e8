"""The study of both ways to call: the same ids, and a ratio with its interval."""

import pytest
from studies.custom_generate import custom_generate
from tests.commands import config_of

from slipstream.configuration import build
from slipstream.evaluation.prompts import Prompt


@pytest.mark.exhaustive
def test_both_ways_give_the_same_and_are_timed():
    target = build(config_of("infer").target)
    prompts = [Prompt("name[The Mill], food[English]", "a"), Prompt("name[Alimentum]", "b")]
    rows = custom_generate(target, prompts, "slipstream/small-streaming", 8, 1).rows
    assert [row["prompts"] for row in rows] == ["a", "b", "all"]
    for row in rows:
        same, count = map(int, row["identical"].split("/"))
        assert same == count and row["low"] <= row["ratio"] <= row["high"]
