"""Sizes that were calibrated, and what tables tell of methods, by prompt set, on tiny models."""

import json
from dataclasses import replace

import pytest
from tests.commands import config_of, refused
from tests.drafters import untrained

from slipstream import app
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Generation, Limits
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.evaluation import methods
from slipstream.evaluation.comparison import Run, compare, summarise
from slipstream.evaluation.methods import Plain, Speculative
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.report import comparison_result
from slipstream.evaluation.run import verify_methods
from slipstream.results.writer import markdown
from slipstream.targets.loading import load_target

PROMPTS = [
    Prompt(text, name)
    for text, name in (
        ("w3 w5 w8 w13 w3 w5", "a"), ("w1 w2", "b"), ("w9 w4 w7 w9", "a"), ("w6 w2 w6", "b"),
    )
]  # fmt: skip


class Telling(Plain):
    """Plain decoding that says which prompt set it was told of."""

    def expect(self, prompt_set: str) -> None:
        self.details = f"for {prompt_set}"


def test_batches_are_of_one_set_and_methods_are_told_which(target, capsys):
    """Prompts of two sets take turns, in the record as well as in `verify`."""
    methods = {"plain": Plain(), "telling": Telling()}
    assert verify_methods(methods, PROMPTS, target, Sampling(), Limits(4), 0, 2) == []
    assert f"verify: {2 * len(PROMPTS)} of {2 * len(PROMPTS)}" in capsys.readouterr().out
    runs = compare(methods, PROMPTS, target, Sampling(), Limits(4), 1, 0, batch_size=2)
    assert runs[1].details == {"a": "for a", "b": "for b"}
    assert [answer.ids for answer in runs[0].generations] == [
        answer.ids for answer in runs[1].generations
    ]
    records = {(each["method"], each["prompt_set"]): each for each in summarise(runs, PROMPTS, "")}
    assert records["telling", "a"]["details"] == "for a"
    assert records["telling", "all"]["details"] == "a: for a; b: for b"
    assert records["plain", "all"]["details"] == ""


@pytest.mark.parametrize("drafter", ["streaming", "auto", "prompt_lookup"])
def test_answers_beyond_what_a_speculator_was_trained_on_are_counted(tmp_path, capsys, drafter):
    """Of streams, alone and beside others; what needs no training has no such end."""
    texts = "name[The Mill], food[English]", "name[The Mill], food[English] " * 40
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    small = "limits.max_new_tokens=4", "num_prompts=2", "repeats=1", f"output_dir={tmp_path}/run"
    app.infer(config_of("infer", f"drafter={drafter}", f"data.path={path}", *small))
    said = "1 of 2 answers of drafter end beyond the 281 tokens of the longest text"
    assert (said in capsys.readouterr().out) == (drafter != "prompt_lookup")


def test_rows_of_a_forward_are_told(target):
    """The nodes of a tree, of plain decoding one; of what counts no forwards, nothing."""
    runs = compare(
        {"plain": Plain(), "drafted": Speculative(untrained.unispec(), 8), "other": Plain()},
        PROMPTS[:1], target, Sampling(), Limits(9), 1, 0,
    )  # fmt: skip
    runs[2].generations[0].statistics.target_rows = 0
    result = comparison_result(summarise(runs, PROMPTS[:1], ""), runs, PROMPTS[:1])
    (table,) = result.tables.values()
    plain, other, drafted = (row["rows"] for row in table)
    assert plain == 1.0 < drafted <= 8 and other is None


def test_memory_of_stores_is_told_by_set_and_kept_stores_are_named(target):
    prompts = [replace(PROMPTS[0], text="w3 w5 w8 " * 9), PROMPTS[1]]
    methods = {
        "lookup": Speculative(PromptLookup(2, 3), 4),
        "kept": Speculative(untrained.lookahead(keep=True), 8),
        "combined": Speculative(untrained.combined(more=untrained.unispec(keep=True)), 8),
        "lengths": Speculative(PromptLookup(2, 3, untrained.gammatune(carry=True)), 4),
    }
    runs = compare(methods, prompts, target, Sampling(), Limits(4), 1, 0)
    records = {(each["method"], each["prompt_set"]): each for each in summarise(runs, prompts, "")}
    stores = [records["lookup", name]["store_bytes"] for name in ("a", "b", "all")]
    assert stores[0] > stores[1] > 0 and stores[2] == stores[0]
    assert [records[name, "all"]["details"] for name in methods] == [
        "",
        "stores kept, branches",
        "stores kept, unispec (prompt), more (prompt)",
        "learns from prompt to prompt",
    ]
    text = markdown(comparison_result(list(records.values()), runs, prompts))
    assert " | stores kept, branches |" in text


def test_calibrating_keeps_a_choice_that_budget_auto_picks_up(tmp_path, capsys):
    """The whole way, on the shipped target; the record says which split was decoded."""
    settings = (
        "drafter=prompt_lookup", "limits.max_new_tokens=6", "num_prompts=1", "repeats=1",
        "calibration.num_prompts=1", "calibration.budgets=[2,4]",
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
    assert "calibrated: " in records[-1]["details"]
    assert all(record["identical"] == record["num_prompts"] for record in records)
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["config"]["data"]["split"] == "test"


def test_a_budget_must_be_a_number_or_auto():
    assert refused(lambda: Speculative(PromptLookup(2, 3), "many")).startswith("budget: ")


def test_the_baseline_is_the_same_model_without_what_its_config_asks_for_besides(monkeypatch):
    target, loaded = load_target("slipstream/small-target", device="cpu"), {}
    target.loading = {"adapter": None, "quantization": "nf4", "device_map": "cpu"}
    theirs = load_target("slipstream/small-target", device="cpu", packed=False)
    theirs.model.generation_config.repetition_penalty = 1.3
    monkeypatch.setattr(methods, "load_target", lambda *_, **given: loaded.update(given) or theirs)
    baseline = methods.Transformers()
    baseline.prepare(target, Sampling(), Limits(4))
    assert loaded == target.loading | {"packed": False}
    assert theirs.model.generation_config.repetition_penalty in (None, 1.0) and theirs.end_ids
    lookup = methods.Transformers(prompt_lookup_num_tokens=3)
    monkeypatch.setattr(methods, "load_target", None)
    lookup.prepare(target, Sampling(), Limits(4))  # with the same weights, which are there once
    assert lookup.target is baseline.target
    assert "methods.transformers=null" in refused(
        lambda: baseline.prepare(target, Sampling(), Limits(4, "."))
    )


def test_intervals_of_batched_runs_draw_batches_again():
    """The prompts of a batch share its seconds, so six in two batches count as two."""
    prompts = [Prompt(f"w{n} w5", "a") for n in range(6)]

    def record(batch_size: int):
        runs = [
            Run(name, None, True, batch_size, None, list(map(_took, seconds)), {"a": 0}, {"a": ""})
            for name, seconds in (("plain", [4.0] * 6), ("other", [1.0] * 3 + [4.0] * 3))
        ]
        return summarise(runs, prompts, "")[1]

    alone, together = record(1), record(3)
    assert alone["speedup_vs_plain"] == together["speedup_vs_plain"] == 1.6
    assert (together["speedup_vs_plain_low"], together["speedup_vs_plain_high"]) == (1.0, 4.0)
    assert 1.0 < alone["speedup_vs_plain_low"] < 1.6 < alone["speedup_vs_plain_high"] < 4.0


def test_answers_are_compared_with_those_of_transformers_else_of_plain_decoding():
    """Not with those of the method that a config happens to name first."""

    def identical(*methods: str) -> dict[str, int]:
        runs = [
            Run(name, None, True, generations=[_took(1.0, last)], store_bytes={"a": 0},
                details={"a": ""})
            for last, name in enumerate(methods)
        ]  # fmt: skip
        found = summarise(runs, [Prompt("w1", "a")], "")
        return {each["method"]: each["identical"] for each in found}

    found = identical("first", "plain", "transformers")
    assert found == {"first": 0, "plain": 0, "transformers": 1}
    assert identical("first", "plain", "other") == {"first": 0, "plain": 1, "other": 0}
    assert identical("first", "other") == {"first": 1, "other": 0}


def _took(seconds: float, last: int = 4) -> Generation:
    counts = Statistics(answers=1, tokens=4, target_forwards=3, seconds=seconds)
    return Generation([1, 2, 3, last], "", "length", counts)
