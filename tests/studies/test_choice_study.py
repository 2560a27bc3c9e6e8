"""The study of the choice at every step, on a tiny target."""

import pytest
from studies import choosing
from tests.drafters.untrained import unispec

from slipstream.core.errors import InputError
from slipstream.decoding.answer import Limits
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.evaluation.prompts import Prompt


def test_every_part_of_every_set_has_its_best_drafter_and_the_choice_beside_it(target, monkeypatch):
    monkeypatch.setattr(choosing, "LIMITS", Limits(12))
    prompts = [Prompt(f"w{n} w{n + 1} w3", "ab"[n % 2]) for n in range(8)]
    drafters = {"unispec": unispec(), "lookup": PromptLookup(2, 4)}
    found = choosing.choosing(target, prompts, drafters, 6, 2, 0.0, 1)
    assert [(row["prompts"], row["draw"], row["count"]) for row in found.rows] == [
        ("a", 1, 2), ("b", 1, 2), ("a", 2, 2), ("b", 2, 2),
    ]  # fmt: skip
    for row in found.rows:
        speeds = {name: float(row[name].split()[0]) for name in drafters} | {"plain": 1.0}
        # which is known to the last digit; speeds are shown with three
        assert speeds[row["best"]] == max(speeds.values())
        ours = float(row["auto"].split()[0])
        assert row["auto / best"] == pytest.approx(ours / speeds[row["best"]], rel=0.02)
        assert row["auto / best, low"] <= row["auto / best"] <= row["auto / best, high"]
    with pytest.raises(InputError, match="4 prompts of a set leave one of 5 draws without any"):
        choosing.choosing(target, prompts, drafters, 6, 5, 0.0, 1)
