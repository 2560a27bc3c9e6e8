"""The load test at small size: every request is answered, and the record has what it prints."""

import json
import subprocess
import sys

import pytest
from tests.commands import ROOT


@pytest.mark.exhaustive
def test_servers_are_compared_under_load(tmp_path):
    command = [sys.executable, "-m", "tools.load", "--clients", "2", "--seconds", "3"]
    command += ["--rounds", "2", "--tokens", "8", "--servers", "slipstream", "plain"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "results.json").read_text())
    ours, plain = record["results"]
    assert (ours["clients"], ours["server"], plain["server"]) == (2, "slipstream", "plain")
    assert ours["vs plain, low"] <= ours["vs plain"] <= ours["vs plain, high"]
    assert ours["vs plain"] == pytest.approx(ours["tokens/s"] / plain["tokens/s"], rel=0.2)
    assert plain["vs plain"] is None and plain["p95, s"] >= plain["p50, s"] > 0
    assert record["environment"]["commit"] and (tmp_path / "plot.png").stat().st_size > 0
