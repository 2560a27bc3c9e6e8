"""The study of SPRINTER beside exact decoding: what it counts, and what it writes."""

import json
from types import SimpleNamespace

import pytest
import torch
from studies.judging import TargetLikelihood, fastchat_files, wins_of
from studies.sprinter import multiplied_weights, sprinter
from tests.tiny import reading_target, tiny_target, tiny_tokenizer

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.core.settings import check
from slipstream.decoding.answer import Generation, Limits
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.acceptance_length import AnyRejected, LastRejected
from slipstream.drafters.draft_length import EntropyBound
from slipstream.evaluation.prompts import Prompt
from slipstream.results.record import environment
from slipstream.results.writer import write
from slipstream.speculators.checkpoint import save_speculator
from slipstream.speculators.classifiers import (
    AcceptanceConfig,
    AcceptanceHead,
    SprinterConfig,
    SprinterVerifier,
)
from slipstream.targets.packed import pack_linears

PROMPTS = [
    Prompt("w1 w2 w3", "first", ("w4 w5 w6",)),
    Prompt("w7 w8", "second", ("w9 w1",)),
    Prompt("w3 w3 w9 w4", "first", ("w2",)),
]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("trained")
    draft = tiny_target(seed=8, hidden_size=16)
    draft.tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    for folder, made in (
        ("verifier", SprinterVerifier(draft, SprinterConfig(("hidden",), (1.2,)))),
        ("head", AcceptanceHead(draft, AcceptanceConfig(width=4, depth=1))),
    ):
        save_speculator(tmp_path / folder, made, draft, 8, "card")
    return dict(
        draft=draft,
        verifier=str(tmp_path / "verifier"),
        lengths={
            "specdec++": AnyRejected(str(tmp_path / "head"), 0.7),
            "adaedl": EntropyBound(0.2, 0.4, 0.9, 0.01, 0.5, 0.9),
        },
        num_tokens=3,
        longest=5,
        points=[(1.2, 0.001), (1.2, 0.5), (1.2, 0.999)],
        calibration=SimpleNamespace(take_for=lambda _, __, count: PROMPTS[:count]),
        calibration_prompts=3,
        tolerance=100.0,
        judge=TargetLikelihood(),
        sampling=Sampling(1.0),
        limits=Limits(12),
        repeats=1,
        seed=0,
    )


@pytest.fixture(scope="module")
def found(study):
    """The whole study."""
    return sprinter(reading_target(), PROMPTS, **study)


def test_a_row_for_every_method_and_task(found, target):
    names = ["plain", "speculative", "specdec++", "adaedl"]
    names += [f"sprinter_1.2_{threshold}" for threshold in ("0.001", "0.5", "0.999")]
    names += ["control_draft", "control_cap"]
    names += [f"random_1.2_{threshold}" for threshold in ("0.001", "0.5", "0.999")]
    expected = [(task, name) for task in ("first", "second", "all") for name in names]
    assert [(row["task"], row["method"]) for row in found.rows] == expected
    overall = {row["method"]: row for row in found.rows if row["task"] == "all"}
    assert {name for name, row in overall.items() if row["exact"] == "yes"} == set(names[:4])
    assert overall["plain"]["tokens/call"] == 1.0 and overall["plain"]["vs plain"] == 1.0
    assert overall["speculative"]["vs SD"] == 1.0 and overall["speculative"]["with SD's"] == 100
    assert overall["speculative"]["vs SD, 95 %"] == "1.00..1.00"
    assert overall["speculative"]["wins vs SD, %"] == 50.0
    flops = 2 * multiplied_weights(target) / 1e6
    steps = 11 / 12  # the first token is the prefill's
    assert overall["plain"]["target MFLOPs/token"] == pytest.approx(flops * steps)
    assert overall["speculative"]["target MFLOPs/token"] > flops * steps
    for row in overall.values():
        assert row["one row a call"] <= row["target MFLOPs/token"] * (1 + 1e-9)
    never, always = overall["sprinter_1.2_0.001"], overall["sprinter_1.2_0.999"]
    assert never["tokens/call"] > 4 and always["tokens/call"] == 1.0
    assert never["distance"] > 0.1 and always["distance"] == pytest.approx(0.0, abs=1e-6)


def test_theory_stands_beside_what_was_measured(found):
    (rows,) = found.more.values()
    by_method = {row["method"]: row for row in rows if row["task"] == "all"}
    always, never = by_method["sprinter_1.2_0.999"], by_method["sprinter_1.2_0.001"]
    assert always["eta_TP"] == always["eta_FP"] == 0.0
    assert always["Theorem 1"] == always["kept a doubt"] == always["memoryless"] == 0.0
    assert always["Theorem 2"] == pytest.approx(0.0, abs=1e-9)
    assert never["eta_TP"] == never["eta_FP"] == pytest.approx(1.0)
    assert never["kept a doubt"] is None
    for name in ("Theorem 1", "d_TV(p, q)", "eta_FP by prefix"):
        assert never["distance"] == pytest.approx(never[name], rel=1e-6)
    (overall,) = [
        r for r in found.rows if (r["task"], r["method"]) == ("all", "sprinter_1.2_0.001")
    ]
    # The first token and every sixth after the others (cap 5) are the target's own.
    assert overall["distance"] == pytest.approx(never["distance"] * 10 / 12, rel=1e-6)


@pytest.mark.exhaustive
def test_controls_ask_as_often_as_the_points(study, target):
    """Where quality may differ as it likes the fastest point is chosen."""
    limits, points = Limits(40), [(1.2, 0.5), (1.2, 0.999)]
    found = sprinter(target, PROMPTS, **(study | dict(points=points, limits=limits, longest=12)))
    (chosen,) = {row["method"] for row in found.rows if row["how"] == "chosen"}
    assert chosen == "sprinter_1.2_0.5"
    rows = {row["method"]: row for row in found.rows if row["task"] == "first"}
    asked = {name: row["tokens/call"] for name, row in rows.items()}  # None where nobody asked
    calls = {name: 1 / tokens if tokens else 0.0 for name, tokens in asked.items()}
    assert calls["control_cap"] == pytest.approx(calls[chosen], rel=0.2)
    for point in ("1.2_0.5", "1.2_0.999"):  # by chance
        assert calls[f"random_{point}"] == pytest.approx(calls[f"sprinter_{point}"], rel=0.4)
    assert rows["control_draft"]["one row a call"] == 0
    assert rows["control_draft"]["distance"] > rows["control_cap"]["distance"] > 0
    assert rows["control_draft"]["distance"] > rows["random_1.2_0.5"]["distance"] > 0
    assert rows["random_1.2_0.5"]["how"].startswith("keeps ")
    low, high = map(float, rows[chosen]["of random's, 95 %"].split(".."))
    share = rows[chosen]["distance"] / rows["random_1.2_0.5"]["distance"]
    assert low - 0.01 <= share <= high + 0.01
    # what doubts everything, as at random with no token kept, is exact: nothing to compare
    assert rows["sprinter_1.2_0.999"]["of random's, 95 %"] is None


@pytest.mark.exhaustive
def test_where_no_point_is_near_enough_the_nearest_is_chosen(study, target):
    changes = dict(points=[(1.2, 0.5), (1.2, 0.999)], tolerance=-200.0)
    rows = sprinter(target, PROMPTS, **(study | changes)).rows
    (chosen,) = {row["method"] for row in rows if row["how"] == "chosen"}
    quality = {row["method"]: row["ROUGE-L"] for row in rows if row["task"] == "all"}
    assert quality[chosen] == max(quality["sprinter_1.2_0.5"], quality["sprinter_1.2_0.999"])


@pytest.mark.parametrize("max_new_tokens", [1, 4])
def test_answers_that_never_need_a_call_are_reported(study, target, max_new_tokens):
    changes = dict(points=[(1.2, 0.001)], limits=Limits(max_new_tokens))
    found = sprinter(target, PROMPTS, **(study | changes))
    rows = [row for row in found.rows if row["method"] == "sprinter_1.2_0.001"]
    assert all(row["one row a call"] == 0 for row in rows)


def test_what_is_written(found, target, tmp_path):
    write(tmp_path, found, {}, environment(target))
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    content = json.loads((tmp_path / "results.json").read_text())
    assert len(content["results"]) == 36
    assert [len(rows) for rows in content["more"].values()] == [9]
    assert (tmp_path / "table.md").read_text().count("###") == 2
    answers = (tmp_path / "fastchat" / "model_answer" / "sprinter_1.2_0.5.jsonl").read_text()
    assert len(answers.splitlines()) == len(PROMPTS)


SMALLEST = dict(points=[(1.2, 0.5)], limits=Limits(3))


def test_rules_that_do_not_fit_are_left_out_and_named(study, target, capsys):
    """A head of another draft model, and a rule that is given as none."""
    lengths = dict(disco=LastRejected("slipstream/small-acceptance", 0.5), adaedl=None)
    found = sprinter(target, PROMPTS, **(study | SMALLEST | dict(lengths=lengths)))
    assert not {row["method"] for row in found.rows} & lengths.keys()
    assert "note: left out study.lengths.disco: speculator: " in capsys.readouterr().out


def test_a_greedy_answer_is_the_reference_where_there_is_none(study, target, capsys):
    prompts = [Prompt(prompt.text, prompt.source) for prompt in PROMPTS]
    found = sprinter(target, prompts, **(study | SMALLEST))
    assert "3 of 3 prompts have no reference" in capsys.readouterr().out
    assert all(row["ROUGE-L"] >= 0 for row in found.rows)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(points=[]), "study.points: must be a non-empty list"),
        (dict(points=[(1.2, 0.4), (1.2, 0.4)]), "study.points: give at least one"),
        (dict(repeats=0), "study.repeats: must be a whole number, at least 1"),
        (
            dict(points=[(1.2, 0.5), (1.2, 1.0)]),
            "threshold: must be a finite number, above 0 and below 1",
        ),
        (dict(points=[(0.0, 0.5)]), "ratio: must be a finite number, above 0"),
        (dict(sampling=Sampling(0.0)), "study.sampling.temperature: SPRINTER samples"),
    ],
)
def test_bad_settings_are_refused(study, target, changes, expected):
    with pytest.raises(InputError, match=expected):
        check(sprinter, changes, "study", later={"target", "prompts", *study})
        sprinter(target, PROMPTS, **(study | changes))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_all_matrices_but_the_tables_are_counted(architecture):
    target = tiny_target(architecture)
    matrices = sum(
        parameter.numel()
        for name, parameter in target.model.named_parameters()
        if parameter.ndim == 2 and not any(table in name for table in ("embed", "wte", "wpe"))
    )
    tied = target.head.weight.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    expected = matrices + (target.head.weight.numel() if tied else 0)
    assert multiplied_weights(target) == expected
    target.model.float()
    pack_linears(target.model)
    assert multiplied_weights(target) == expected


def answer(ids: list[int], text: str = "") -> Generation:
    return Generation(ids, text, "end", Statistics())


@torch.no_grad()
def test_the_target_judges_by_the_mean_log_probability_of_the_tokens(target):
    prompt, ids = Prompt("w1 w2", "set"), [5, 9, 3]
    logs = target.model(torch.tensor([[1, 2, 5, 9, 3]])).logits[0].log_softmax(-1)
    expected = float(logs[1, 5] + logs[2, 9] + logs[3, 3]) / 3
    (found,) = TargetLikelihood().scores(target, [prompt], [answer(ids)])
    assert found == pytest.approx(expected, rel=1e-5)


def test_ties_count_half():
    wins = wins_of([1.0, 2.0, 3.0, 4.0], [0.0, 2.0, 5.0, 1.0])
    assert wins.tolist() == [100.0, 50.0, 0.0, 100.0]


def test_answers_are_exported_as_fastchat_reads_them():
    files = fastchat_files(PROMPTS[:1], {"plain": [answer([4], "w4")]})
    assert files.keys() == {"fastchat/question.jsonl", "fastchat/model_answer/plain.jsonl"}
    question = json.loads(files["fastchat/question.jsonl"])
    assert question == {"question_id": 0, "category": "first", "turns": ["w1 w2 w3"]}
    record = json.loads(files["fastchat/model_answer/plain.jsonl"])
    assert record["choices"] == [{"index": 0, "turns": ["w4"]}]
    assert record["question_id"] == 0 and record["model_id"] == "plain"
