"""The script for a GPU machine, at small size on a CPU, and without what it does not need."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from studies import gpu, timing
from tests.commands import ROOT, config_of

from slipstream.configuration import build
from slipstream.targets.packed import is_fused

RUN = """
import sys
for name in ("hydra", "omegaconf", "lightning", "datasets", "wandb", "peft", "rich", "scipy",
             "bitsandbytes", "rouge_score", "matplotlib", "pydantic", "annotated_types"):
    sys.modules[name] = None
from studies import gpu
gpu.PROMPTS, gpu.DEFERRED, gpu.FUSED, gpu.ROW_COUNTS = gpu.PROMPTS[:2], (4,), (4,), (1, 4)
gpu.main(sys.argv[1:])
"""


@pytest.mark.exhaustive
def test_the_script_runs_without_hydra(tmp_path):
    out = tmp_path / "gpu.json"
    given = "--size", "small", "--dtype", "float32", "--repeats", "1", "--out", str(out)
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    run = subprocess.run(
        [sys.executable, "-c", RUN, *given],
        capture_output=True, text=True, cwd=tmp_path, timeout=300,
        env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    exact = found["Exact answers, float32"]
    assert len(exact) == 6
    for row in exact:
        assert (row["greedy"], row["batch"], row["sampled"]) == ("2/2", "2/2", "2/2"), row
    speeds = {row["method"]: row for row in found["Decoding"]}
    assert speeds["plain"]["tau"] == 1 < speeds["deferred, 4 nodes"]["tau"]
    assert all(row["tokens/s"] > 0 for row in speeds.values())
    assert [row["rows"] for row in found["Cost of rows"]] == [1, 4]
    sampled = [row for row in found["Cost of sampling"] if row["sampling"] != "greedy"]
    assert len(sampled) == 4 and all(row["vs greedy"] > 0 for row in sampled)
    assert found["Memory"][0]["bandwidth, GB/s"] > 0
    assert {row["method"] for row in found["Time of a step"]} == {"plain", "deferred"}
    steps = found["Training step"]
    assert [row["pair scores"] for row in steps] == ["yes"] * 2 + ["no"] * 2
    assert all(row["seconds"] > 0 for row in steps)
    assert "Exact answers" in run.stdout and "Training step" in run.stdout


def test_what_there_is_no_time_for_is_named(tmp_path, capsys):
    found = gpu.main(["--size", "small", "--minutes", "0", "--out", str(tmp_path / "gpu.json")])
    named = [row["part"] for row in found["Skipped for want of time"]]
    assert named[0] == "Exact answers, float32" and named[-1] == "Training step"
    assert not set(named) & set(found)
    assert "--minutes" in (said := capsys.readouterr().out) and all(name in said for name in named)
    assert json.loads((tmp_path / "gpu.json").read_text()) == found


def test_the_large_target_is_as_users_get_it_and_is_trained_as_they_train():
    target, _ = gpu._large("small", "cpu", "float32")
    assert is_fused(target.model)
    assert build(config_of("train", "speculator=streaming").speculator) == timing.RECIPE
    rows = timing.training_steps(target, (16,), 1)
    assert [row["pair scores"] for row in rows] == ["yes"] * 2 + ["no"] * 2
    assert not is_fused(target.model)


def test_a_device_is_timed_by_its_own_clock(monkeypatch):
    class Event:
        clock = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = Event.clock

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at

    def call():
        Event.clock += 250.0  # ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert timing.timed({"call": call}, 3, torch.device("cuda")) == {"call": 0.25}


def test_a_part_that_fails_is_named_at_the_end(tmp_path, monkeypatch, capsys):
    def broken(*_):
        time.sleep(0.05)  # after which no other part begins
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu, "exactness", broken)
    out = tmp_path / "gpu.json"
    with pytest.raises(SystemExit, match="failed, as said above: Exact answers, float32"):
        gpu.main(["--size", "small", "--minutes", "0.0001", "--out", str(out)])
    assert "no such kernel" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["Exact answers, float32"] == [{"failed": "RuntimeError: no such kernel"}]
    assert len(found["Skipped for want of time"]) == 6


def test_an_answer_that_is_not_exact_fails(tmp_path, monkeypatch):
    """A broken reference, so that no answer is its."""

    def generate(target, ids, _):
        return [target.head.out_features]

    monkeypatch.setattr(gpu, "_generate", generate)
    monkeypatch.setattr(gpu, "PROMPTS", gpu.PROMPTS[:1])
    out = tmp_path / "gpu.json"
    with pytest.raises(SystemExit, match="failed, as said above: Exact answers, float32"):
        gpu.main(["--size", "small", "--minutes", "0.0001", "--out", str(out)])
    rows = json.loads(out.read_text())["Exact answers, float32"]
    assert {(row["greedy"], row["sampled"], row["exact"]) for row in rows} == {("0/1", "1/1", "no")}
