"""The script for a GPU machine, at small size on a CPU, and without what it does not need."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
    command = [sys.executable, "-c", RUN, "--size", "small", "--repeats", "1", "--out", str(out)]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=300,
        env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    exact = found["Exact answers, float32"]
    assert len(exact) == 5
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
    assert all(row["seconds"] > 0 for row in found["Training step"])
    assert "Exact answers" in run.stdout and "Training step" in run.stdout
