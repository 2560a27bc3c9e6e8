"""Auto, sizes that were calibrated, and what tables tell of methods, on tiny models."""

import json
from dataclasses import replace

from tests.commands import config_of, refused
from tests.drafters import untrained
from tests.tiny import tiny_target

from slipstream import app
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.evaluation.auto import Auto
from slipstream.evaluation.comparison import compare, summarise
from slipstream.evaluation.methods import Plain, Speculative
from slipstream.evaluation.prompts import Prompt, PromptSets
from slipstream.evaluation.report import comparison_result
from slipstream.evaluation.run import verify_methods
from slipstream.results.writer import markdown

PROMPTS = [
    Prompt(text, name)
    for text, name in (
        ("w3 w5 w8 w13 w3 w5", "a"), ("w1 w2", "b"), ("w9 w4 w7 w9", "a"), ("w6 w2 w6", "b"),
    )
]  # fmt: skip


class Slow(Plain):
    """Plain decoding that says it takes longer on one prompt set."""

    def __init__(self, slow_on: str):
        super().__init__()
        self.slow_on, self.expected = slow_on, ""

    def expect(self, prompt_set: str) -> None:
        self.expected = prompt_set

    def generate(self, prompts, seeds):
        answers = super().generate(prompts, seeds)
        for answer in answers:
            answer.statistics.seconds = 2.0 if self.expected == self.slow_on else 1.0
        return answers


def test_auto_takes_what_is_fastest_on_each_set(target, capsys):
    assert "name at least one" in refused(lambda: Auto({"one": None}, 2))
    auto = Auto({"one": Slow("a"), "other": Slow("b"), "left out": None}, 2)
    assert "not tried" in refused(lambda: auto.expect("a"))
    auto.choose(PROMPTS, target, Sampling(), Limits(4))
    assert auto.choices == {"a": "other", "b": "one"}
    assert "auto: other on a, one on b" in capsys.readouterr().out
    auto.expect("a")
    assert auto.chosen is auto.candidates["other"]
    assert "not tried" in refused(lambda: auto.expect("c"))
    other = Auto({"one": Plain(tiny_target(seed=4))}, 2)
    message = refused(lambda: other.choose(PROMPTS[:1], target, Sampling(), Limits(4)))
    assert "a target of its own" in message and "candidates.one=null" in message


def test_auto_answers_batches_and_is_verified_by_sets(target, capsys):
    """Prompts of two sets take turns, and each is answered by the choice for its own set."""
    methods = {"plain": Plain(), "auto": Auto({"one": Slow("a"), "other": Slow("b")}, 2)}
    methods["auto"].choose(PROMPTS, target, Sampling(), Limits(4))
    capsys.readouterr()
    assert verify_methods(target, methods, PROMPTS, Sampling(), Limits(4), 0, 2) == []
    assert f"verify: {2 * len(PROMPTS)} of {2 * len(PROMPTS)}" in capsys.readouterr().out
    runs = compare(methods, PROMPTS, target, Sampling(), Limits(4), 1, 0, batch_size=2)
    assert runs[1].details == {"a": "other", "b": "one"}
    assert [answer.statistics.seconds for answer in runs[1].generations] == [1.0] * 4
    assert [answer.ids for answer in runs[0].generations] == [
        answer.ids for answer in runs[1].generations
    ]
    records = {(each.method, each.prompt_set): each for each in summarise(runs, PROMPTS, "")}
    assert records["auto", "a"].details == "other"
    assert records["auto", "all"].details == "a: other; b: one"
    assert records["plain", "all"].details == ""


def test_memory_of_stores_is_told_by_set_and_kept_stores_are_named(target):
    prompts = [replace(PROMPTS[0], text="w3 w5 w8 " * 9), PROMPTS[1]]
    methods = {
        "lookup": Speculative(PromptLookup(2, 3), 4),
        "kept": Speculative(untrained.lookahead(keep=True), 8),
        "combined": Speculative(untrained.combined(more=untrained.unispec(keep=True)), 8),
    }
    runs = compare(methods, prompts, target, Sampling(), Limits(4), 1, 0)
    records = {(each.method, each.prompt_set): each for each in summarise(runs, prompts, "")}
    stores = [records["lookup", name].store_bytes for name in ("a", "b", "all")]
    assert stores[0] > stores[1] > 0 and stores[2] == stores[0]
    assert [records[name, "all"].details for name in methods] == ["", "stores kept", "stores kept"]
    text = markdown(comparison_result(list(records.values()), runs, prompts))
    assert " | stores kept |" in text


class Timed(Plain):
    """Plain decoding that says how long an answer takes: one of `seconds` after the other."""

    def __init__(self, *seconds: float):
        super().__init__()
        self.seconds, self.answered = seconds, 0

    def generate(self, prompts, seeds):
        (answer,) = super().generate(prompts, seeds)
        answer.statistics.seconds = self.seconds[min(self.answered, len(self.seconds) - 1)]
        self.answered += 1
        return [answer]


def test_only_the_faster_half_goes_on_to_twice_as_many_prompts(target):
    """One third, then two; `late` is fast on the first prompt alone."""
    warm_ups = 2
    candidates = {
        "slow": Timed(5.0), "slower": Timed(6.0), "third": Timed(3.0), "fast": Timed(2.0),
        "late": Timed(*[1.0] * (1 + warm_ups), 9.0),
    }  # fmt: skip
    auto = Auto(candidates, 3)
    auto.choose([replace(PROMPTS[0], source="a")] * 3, target, Sampling(), Limits(4))
    answered = {name: candidate.answered for name, candidate in candidates.items()}
    once, twice = 1 + warm_ups, 3 + 2 * warm_ups
    assert answered == dict(slow=once, slower=once, third=twice, fast=twice, late=twice)
    assert auto.choices == {"a": "fast"}
    alone = Auto({"one": Timed(1.0)}, 3)
    alone.choose(PROMPTS, target, Sampling(), Limits(4))
    assert set(alone.choices.values()) == {"one"}


def test_prompts_to_choose_by_are_other_ones():
    sets = PromptSets(None, None, ["data_to_text", "text_to_sql"], "test", 0)
    taken = sets.take(6)
    others = sets.beside(taken, 2)
    assert [each.source for each in others] == ["data_to_text"] * 2 + ["text_to_sql"] * 2
    assert not {each.text for each in others} & {each.text for each in taken}


def test_prompts_to_choose_by_come_from_all_over_the_file(tmp_path):
    """Files are sorted, by task or by name: their beginning says little about the rest."""
    path = tmp_path / "sorted.jsonl"
    rows = [{"prompt": f"prompt {place}", "completion": "yes"} for place in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = PromptSets(str(path), None, None, "test", 0)
    taken = sets.take(20)
    places = [int(each.text.split()[-1]) for each in sets.beside(taken, 40)]
    assert len(set(places)) == 40
    for part in (places, places[:20]):  # a heat as well as the whole
        assert 0.3 < sum(place < 150 for place in part) / len(part) < 0.7
    assert not set(places) & {int(each.text.split()[-1]) for each in taken}


def test_calibrating_keeps_a_choice_that_auto_picks_up(tmp_path, capsys):
    """The whole way, on the shipped target; the record says which split was decoded."""
    settings = (
        "drafter=prompt_lookup", "limits.max_new_tokens=12", "num_prompts=2", "repeats=1",
        "calibration.num_prompts=2", "calibration.budgets=[2,4]",
        f"calibration.folder={tmp_path}/kept", f"output_dir={tmp_path}/out",
    )  # fmt: skip
    auto = "budget=auto"
    assert "calibrate=true" in refused(lambda: app.infer(config_of("infer", *settings, auto)))
    rows = app.infer(config_of("infer", *settings, "calibrate=true"))
    assert [(row["way"], row["nodes"]) for row in rows][:3] == [
        ("plain", 1), ("PromptLookup", 2), ("PromptLookup", 4)
    ]  # fmt: skip
    assert (tmp_path / "out" / "plot.png").stat().st_size > 10_000
    plain = "no size beats plain decoding" in capsys.readouterr().out
    records = app.infer(config_of("infer", *settings, auto))
    said = capsys.readouterr().out
    assert ("so it decodes plainly" if plain else "nodes, as calibrated") in said
    assert "calibrated: " in records[-1].details
    assert all(record.identical == record.num_prompts for record in records)
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["config"]["data"]["split"] == "test"


def test_a_budget_must_be_a_number_or_auto():
    assert refused(lambda: Speculative(PromptLookup(2, 3), "many")).startswith("budget: ")
