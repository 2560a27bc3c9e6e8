"""Studies that are comparisons over settings: what each run is, and the table of all of them."""

import json
import os
import shutil
from itertools import chain, product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_object
from omegaconf import OmegaConf
from studies.collect import BOUNDS, Collect, collect
from studies.draft_lengths import cost_model
from studies.pairs import pairs
from tests.commands import ROOT, config_of, refused, script
from tests.tiny import save_tiny_target, tiny_speculator

from slipstream import app
from slipstream.commands import Infer
from slipstream.configuration import build, check_config
from slipstream.results.record import Rows
from slipstream.speculators.checkpoint import save_speculator
from slipstream.targets.loading import load_target


def swept(path: Path) -> dict[str, list[str]]:
    """The settings of a study that is a multirun, by key; {} for others."""
    hydra = OmegaConf.load(path).get("hydra") or {}
    parameters = (hydra.get("sweeper") or {}).get("params") or {}
    assert (hydra.get("mode") is not None) == bool(parameters)
    return {key: values.split(",") for key, values in parameters.items()}


STUDIES = sorted((ROOT / "conf" / "study").glob("*.yaml"))
SWEPT = {path.stem: found for path in STUDIES if (found := swept(path))}
FEW = ("num_prompts=2", "repeats=1", "limits.max_new_tokens=8", "target.device=cpu")


@pytest.mark.exhaustive
@pytest.mark.parametrize("study", SWEPT)
def test_every_run_of_a_sweep_composes(study):
    for values in product(*SWEPT[study].values()):
        given = [f"{key}={value}" for key, value in zip(SWEPT[study], values, strict=True)]
        config = config_of("infer", f"study={study}", *given)
        check_config(config, Infer)
        assert config.study is None
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        hydra = compose("infer", [f"study={study}"], return_hydra_config=True).hydra
    assert isinstance(build(hydra.callbacks.collect), Collect)
    assert get_object(hydra.callbacks.collect._target_) is Collect


@pytest.mark.parametrize("study", ["msa_layers", "value_rotation", "quantization"])
def test_what_is_trained_first_lies_where_it_is_looked_for(study):
    """The command for train.py stands in the study's file."""
    text = (ROOT / "conf" / "study" / f"{study}.yaml").read_text()
    (command,) = [line for line in text.splitlines() if line.startswith("# python train.py -m ")]
    given = [word.strip("'") for word in command.removeprefix("# python train.py -m ").split()]
    (sweep,) = [word for word in given if "," in word and "[" not in word]
    key, values = sweep.split("=")
    target = load_target("slipstream/small-target", device="cpu", packed=False)
    folders = []
    for value in values.split(","):
        others = [word for word in given if word != sweep] + [f"{key}={value}"]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            subdir = compose("train", others, return_hydra_config=True).hydra.sweep.subdir
        config = config_of("train", *(word for word in others if not word.startswith("hydra.")))
        build(config.speculator).check_against(target)
        folders.append(str(Path("runs", study, subdir, "model")))
    given = SWEPT[study]
    if "speculator_path" in given:
        assert folders == given["speculator_path"]
    else:
        found = [config_of("infer", f"study={study}", f"{key}={value}") for value in given[key]]
        assert folders == [config.speculator_path for config in found]


@pytest.mark.exhaustive
def test_a_sweep_gives_a_folder_for_each_run_and_one_table(tmp_path):
    given = "study=batches", *FEW, "batch_size=1,2", "budget=1,4", f"output_dir={tmp_path / 'out'}"
    done = script("infer.py", *given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = [row for row in content["results"] if row["prompt_set"] == "all"]
    assert [(row["batch_size"], row["budget"], row["method"]) for row in rows] == [
        (size, nodes, name) for size in (1, 2) for nodes in (1, 4) for name in ("plain", "drafter")
    ]
    assert all(row["identical"] == 2 and row["tokens_per_second"] > 0 for row in rows)
    assert {row["tau"] for row in rows if row["budget"] == 1} == {1.0}
    assert {run["batch_size"] for run in content["config"].values()} == {1, 2}
    assert content["title"] == "Batches (Figure 18)" and len(content["environment"]) == 4
    assert "### Batches (Figure 18)" in (tmp_path / "out" / "table.md").read_text()
    assert (tmp_path / "out" / "plot.png").stat().st_size > 10_000


@pytest.mark.exhaustive
def test_a_sweep_goes_on_after_a_run_that_is_refused(tmp_path):
    given = "-m", "drafter=adaptive,prompt_lookup", *FEW, f"output_dir={tmp_path / 'out'}"
    done = script("infer.py", *given, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.count("error: drafter.length: has no value") == 1
    assert (tmp_path / "out" / "1" / "results.json").is_file()


def ran(folder, number: int, given: list[str]) -> Rows:
    """What `infer.py` would leave for one run of a sweep."""
    output = folder / str(number)
    app.infer(config_of("infer", *given, *FEW, f"output_dir={output}"))
    (output / "config").mkdir(exist_ok=True)
    (output / "config" / "overrides.yaml").write_text(json.dumps([*given, *FEW]))


@pytest.mark.exhaustive
def test_rules_are_compared_over_the_lengths_they_begin_with(tmp_path):
    for number, length in enumerate((2, 5)):
        ran(tmp_path, number, ["study=draft_lengths", f"drafter.num_tokens={length}"])
    result = collect(tmp_path, "Rules", "fixed", cost_model)
    assert {row["drafter.num_tokens"] for row in result.rows} == {2, 5}
    assert all(row["identical"] == 2 for row in result.rows if row["prompt_set"] == "all")
    (_, spread, costs) = result.shown.values()
    assert {row["gamma"] for row in costs} == {2, 5}
    for row in costs:
        assert 0 <= row["alpha"] <= 1 and row["c"] > 0
        ratio = row["c"] * (row["alpha"] * row["gamma"] + 1) / (row["c"] + row["gamma"])
        assert row["Eq. 6"] == pytest.approx(ratio)
    names = ["plain", "fixed", "assistant_threshold", "adaedl"]
    names += [
        f"{rule}{end}"
        for rule in ("heuristic", "gammatune", "gammatune_plus")
        for end in ("", "_reset")
    ]
    found = {row["method"]: row for row in spread}
    assert found.keys() == set(names)
    assert found["fixed"]["vs fixed"] == found["fixed"]["spread vs fixed"] == 1.0
    assert found["fixed"]["vs fixed, 95 %"] == "1.00" != found["plain"]["vs fixed, 95 %"]
    config = json.loads((tmp_path / "1" / "results.json").read_text())["config"]["methods"]
    assert (
        config["gammatune_reset"]["drafter"]["length"] | {"initial": 5, "carry": False}
        == (config["gammatune_reset"]["drafter"]["length"])
    )


@pytest.mark.exhaustive
def test_every_quantisation_is_compared_with_its_own_plain_decoding(tmp_path):
    """Training is replaced by a random speculator."""
    folder = str(save_tiny_target(tmp_path / "target", hidden_size=64, intermediate_size=128))
    (tmp_path / "rows").mkdir()
    prompts = [{"prompt": f"w{n} w5 w6", "completion": "w7 w8"} for n in range(10, 14)]
    (tmp_path / "rows" / "test.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    for number, kind in enumerate((None, "nf4")):
        own = load_target(folder, device="cpu", quantization=kind)
        made = tmp_path / "runs" / str(kind) / "model"
        save_speculator(made, tiny_speculator(own).float(), own, 64, "")
        ran(
            tmp_path / "out",
            number,
            [
                "study=quantization", f"target.quantization={kind or 'null'}",
                f"target.name={folder}", f"data.path={tmp_path / 'rows'}",
                f"speculator_path={tmp_path}/runs/${{target.quantization}}/model",
            ],
        )  # fmt: skip
    rows = collect(tmp_path / "out").rows
    assert [row["target.quantization"] for row in rows] == ["none", "none", "nf4", "nf4"]
    assert rows[0]["weights, MiB"] > rows[2]["weights, MiB"]
    for row in rows:
        assert row["identical"] == 2 and row["tau"] >= 1


@pytest.mark.exhaustive
def test_top_k_sampling_is_measured_for_every_k(tmp_path):
    for number, top_k in enumerate((1, 5)):
        ran(tmp_path, number, ["study=top_k_sampling", f"sampling.top_k={top_k}"])
    rows = [row for row in collect(tmp_path).rows if row["method"] == "drafter"]
    assert {row["sampling.top_k"] for row in rows} == {1, 5}
    assert all(row["tau"] >= 1 and row["speedup_vs_plain"] > 0 for row in rows)


def test_rows_of_a_study_are_collected_with_what_its_runs_differ_in(tmp_path):
    for threads in (1, 2):
        output = tmp_path / str(threads)
        (output / "config").mkdir(parents=True)
        rows = [
            {"drafter": name, "way": "any", "g*": threads * nodes, "tau": 2.5}
            for name, nodes in (("one", 4), ("other", 8))
        ]
        record = {"results": rows, "config": {}, "environment": {"weight_bytes": 0}}
        (output / "results.json").write_text(json.dumps(record))
        given = ["study=draft_size", f"threads={threads}"]
        (output / "config" / "overrides.yaml").write_text(json.dumps(given))
    result = collect(tmp_path, "Sizes")
    (shown,) = result.shown.values()
    assert [(row["threads"], row["drafter"], row["g*"]) for row in shown] == [
        (1, "one", 4), (1, "other", 8), (2, "one", 8), (2, "other", 16)
    ]  # fmt: skip
    (plot,) = result.plots
    assert (plot.x, plot.y, plot.hue) == ("threads", ("g*", "tau"), "line")
    shutil.rmtree(tmp_path / "2")
    (plot,) = collect(tmp_path, "Sizes").plots
    assert (plot.x, plot.y) == ("drafter", ("g*", "tau"))
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_methods_are_compared_answer_by_answer(tmp_path):
    """One is twice as fast as the other in both sets, and has 4/3 of its tokens a step."""
    lines = [
        {"method": name, "prompt_set": place, "tokens": 9, "seconds": seconds * long,
         "accepted": [0] * forwards}
        for name, seconds, forwards in (("one", 1.0, 3), ("other", 2.0, 4))
        for place, long in (("a", 1), ("a", 3), ("b", 5))
    ]  # fmt: skip
    lines += [line | {"method": "none", "accepted": []} for line in lines[:3]]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "results.json").write_text('{"config": {"batch_size": 1}}')
    rows = pairs(tmp_path, ["one/other", "other/one"]).rows
    assert [(row["pair"], row["prompts"]) for row in rows] == [
        (pair, name) for pair in ("one/other", "other/one") for name in ("a", "b", "all")
    ]
    for row in rows:
        speed, tau = (2, 4 / 3) if row["pair"] == "one/other" else (1 / 2, 3 / 4)
        assert (row["speed"], row["tau"]) == (pytest.approx(speed), pytest.approx(tau))
        assert row["speed, 95 %"] == f"{speed:.2f} to {speed:.2f}"
    for wrong in ("one", "one/third", "one/other/one"):
        said = refused(lambda: pairs(tmp_path, [wrong]))  # noqa: B023
        assert said.endswith("two of one, other, none")
    row = pairs(tmp_path, ["one/none"]).rows[0]
    assert row["speed"] == 1 and row["tau"] is row["tau, 95 %"] is None
    (tmp_path / "results.json").write_text('{"config": {"batch_size": 2}}')
    assert "share its time" in refused(lambda: pairs(tmp_path, ["one/other"]))
    assert "has no answers.jsonl" in refused(lambda: pairs(tmp_path / "none", ["one/other"]))


def test_a_folder_without_runs_is_refused(tmp_path):
    assert "holds no runs" in refused(lambda: collect(tmp_path))


def test_runs_of_an_earlier_sweep_are_not_collected(tmp_path, monkeypatch):
    written = {}
    monkeypatch.setattr("studies.collect.columns", lambda _: {"tau": 1.0})
    monkeypatch.setattr("studies.collect.write", lambda *given: written.update(given[2]))
    ends = dict.fromkeys(chain(*BOUNDS.values()), 1.0)
    record = {"results": [{"prompt_set": "a", "method": "b", **ends}], "config": {}}
    for number in range(2):
        (tmp_path / str(number) / "config").mkdir(parents=True)
        (tmp_path / str(number) / "config" / "overrides.yaml").write_text(f"- budget={number}")
        content = json.dumps(record | {"environment": {"weight_bytes": 1}})
        (tmp_path / str(number) / "results.json").write_text(content)
    os.utime(tmp_path / "0" / "results.json", (1, 1))
    made, config = Collect(), OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    made.on_multirun_start(config)
    made.on_multirun_end(config)
    assert written.keys() == {"1"}
