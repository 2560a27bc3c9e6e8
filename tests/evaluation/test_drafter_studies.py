"""Auto, and the studies of draft lengths, draft sizes and acceptance, on tiny models."""

import json
from dataclasses import replace

import pytest
from tests.commands import config_of, refused
from tests.drafters import untrained
from tests.tiny import tiny_speculator, tiny_target

from slipstream import app
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.drafters.draft_length import AssistantThreshold
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.rest import Rest
from slipstream.drafters.streaming import Streaming
from slipstream.drafters.suffixes import Retrieval
from slipstream.evaluation.auto import Auto
from slipstream.evaluation.comparison import compare, summarise
from slipstream.evaluation.methods import Plain, Speculative
from slipstream.evaluation.prompts import Prompt, PromptSets
from slipstream.evaluation.report import markdown
from slipstream.evaluation.run import verify_methods
from slipstream.evaluation.studies.acceptance import AcceptanceStudy
from slipstream.evaluation.studies.draft_lengths import DraftLengthStudy
from slipstream.evaluation.studies.draft_size import DraftSizeStudy
from slipstream.evaluation.studies.drafting_costs import DraftingCostStudy, ZipfCorpus

PROMPTS = [
    Prompt(text, name)
    for text, name in (
        ("w3 w5 w8 w13 w3 w5", "a"), ("w1 w2", "b"), ("w9 w4 w7 w9", "a"), ("w6 w2 w6", "b"),
    )
]  # fmt: skip


def test_rules_are_compared_over_the_lengths_they_begin_with(target):
    rules = {
        "fixed": None,
        "threshold": AssistantThreshold(0.3),
        "gammatune": untrained.gammatune(most=6),
    }
    draft = tiny_target(num_hidden_layers=1, seed=5)
    draft.tokenizer = target.tokenizer
    study = DraftLengthStudy(draft, rules, [1, 4], 6, 1)
    found = study.run(target, PROMPTS)
    assert [row["rule"] for row in found.rows] == [
        "fixed", "threshold", "gammatune", "gammatune_reset"
    ]  # fmt: skip
    assert found.rows[0]["vs fixed"] == found.rows[0]["spread vs fixed"] == 1.0
    assert all(row["identical"] == "8/8" for row in found.rows)
    assert [row["begins with"] for row in found.more["Tokens a second"]] == [1, 4]
    assert "fixed: null" in refused(lambda: DraftLengthStudy(target, {}, [1], 2, 1))


def test_calibrated_sizes_are_compared_with_all_sizes(target):
    drafters = {
        "streaming": Streaming(tiny_speculator(target), "auto", 2),
        "lookup": PromptLookup(2, 8),
    }
    usual = {"lookup": 12}
    study = DraftSizeStudy(drafters, [2, 4, 8], 1, [2], usual, calibration_prompts=1, repeats=1)
    found = study.run(target, PROMPTS)
    # three sizes of each way, and plain decoding, on one prompt; seven sizes on three
    measured = {"streaming": 2 * 3 + 1, "lookup": 3 + 1}
    for row in found.rows:
        assert row["drafter"] in drafters and 2 <= row["best g"] <= 8
        assert 0 < row["g* vs best"] <= 1
        low, high = map(float, row["95 %"].split(" to "))
        assert low <= row["g* vs best"] <= high
        share = row["share of the search's measurements"]
        assert share == pytest.approx(measured[row["drafter"]] / (7 * 3))
    assert [row["usual g"] for row in found.rows] == ["-", 12]
    assert found.rows[0]["g* vs usual"] == "-" and found.rows[1]["g* vs usual"] > 0
    others = dict(calibration_prompts=1, repeats=1)
    wrong = refused(lambda: DraftSizeStudy(drafters, [2], 1, [], {"streams": 4}, **others))
    assert wrong == "study.usual: there is no drafter streams; name some of streaming, lookup"
    around = found.more["Sizes around g* (Table 13)"]
    assert {row["minus g*"] for row in around if row["vs g*"] == 1.0} == {0}
    study = DraftSizeStudy({"lookup": PromptLookup(2, 8)}, [2, 4, 8], 2, [], {}, **others)
    assert not study.run(target, PROMPTS).more


def test_acceptance_is_counted_by_source_and_by_confidence(target):
    retrieval = untrained.retrieval([[3, 5, 8], [9, 4, 7, 9, 4]])
    spectra = untrained.spectra(text=True, retrieval=retrieval)
    scores = {"one": untrained.unispec(threshold=0.0), "other": untrained.unispec(threshold=0.2)}
    found = AcceptanceStudy(spectra, scores, 12).run(target, PROMPTS)
    assert [row["source"] for row in found.rows] == [
        "backward dictionary", "forward dictionary", "corpus"
    ]  # fmt: skip
    steps = {row["steps"] for row in found.rows}
    assert len(steps) == 1 and all(0 <= row["right share of tokens"] <= 1 for row in found.rows)
    (bins,) = found.more.values()
    for name in scores:
        own = [row for row in bins if row["scores"] == name]
        assert sum(row["share of nodes"] for row in own) == pytest.approx(1)
        assert all(0 <= row["accepted"] <= 1 for row in own)
        for row in own:
            low, high = map(float, row["confidence"].split(" to "))
            assert low - 1e-6 <= row["mean"] <= high + 1e-6
    # Below its threshold nodes are drafted, too.
    assert min(row["mean"] for row in bins if row["scores"] == "other") < 0.2


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
    assert " | stores kept |" in markdown(list(records.values()))


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
    assert [(row["way"], row["nodes"]) for row in rows] == [
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


def test_costs_are_measured_by_vocabulary_and_by_corpus(target):
    rest = Rest(Retrieval(ZipfCorpus(2000), 4, 8, 4))
    drafters = {"unispec": untrained.unispec(), "rest": rest}
    study = DraftingCostStudy(drafters, 6, [100], [3000], lookups=20)
    found = study.run(target, PROMPTS)
    row, retrieved = found.rows
    names = (f"{target.vocab_size} (the target)", "100")
    assert all(row[f"ms a step, {name}"] > 0 for name in names)
    assert row["store MB, 100"] == pytest.approx(100 * 2 * 8 / 1e6)
    for each in found.rows:
        assert 0 < each["share of the target's step, %"] < 100
    assert retrieved["store MB, 100"] == pytest.approx(8 * (2000 + 2000 // 512) / 1e6)
    (corpus,) = found.more["Sorted corpora"]
    assert corpus["tokens"] == 3000 + 3000 // 512
    assert corpus["MB"] == pytest.approx(8 * corpus["tokens"] / 1e6)
    assert corpus["found a look-up, tokens"] > 1
