"""Studies: memory metering, calibration of pruning, and that each one runs and writes its files."""

import json

import pytest
import torch
from slipstream.core.tree import DraftTree
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core.errors import InputError
from slipstream.decoding.answer import Limits
from slipstream.decoding.pruning_calibration import SeenTree, calibrate, outcome, record_trees
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.studies.findings import Findings, markdown, write_findings
from slipstream.evaluation.studies.memory import PeakMemory
from slipstream.evaluation.studies.overheads import OverheadStudy
from slipstream.evaluation.studies.segments import DENSE, SegmentStudy
from slipstream.evaluation.studies.steps import run_step
from slipstream.speculators.streaming.config import StreamingConfig


def test_peak_memory_counts_what_is_made_and_forgets_what_is_freed():
    before = torch.randn(100, 100, requires_grad=True)
    with PeakMemory() as memory:
        made = torch.zeros(1000, 100)
        assert memory.live == 400_000
        view = made[:500]
        assert memory.live == 400_000
        product = made @ before
        assert memory.live == 800_000
        del product, view
        assert memory.live == 400_000
        before.t()
        assert memory.live == 400_000
    assert memory.peak == 800_000


def test_peak_memory_sees_saved_activations_and_gradients():
    weight = torch.randn(100, 100, requires_grad=True)
    rows = torch.randn(1000, 100)
    with PeakMemory() as memory:
        loss = (rows @ weight).relu().square().sum()
        saved = memory.live
        loss.backward()
    assert saved >= 400_000
    assert memory.peak >= saved + 400_000


TREE = DraftTree([7, 1, 2, 3], [-1, 0, 0, 1])


def test_a_root_alone_is_no_draft_that_survived():
    trees = [SeenTree(TREE, [1.0, 0.9, 0.1, 0.8], path) for path in ([0], [0], [0, 2])]
    found = outcome(trees, 0.5, 4)
    assert (found.kept_paths, found.kept_drafts) == (2 / 3, 0.0)


def test_outcome_counts_paths_and_nodes():
    trees = [
        SeenTree(TREE, [1.0, 0.9, 0.1, 0.8], [0, 1, 3]),
        SeenTree(TREE, [1.0, 0.2, 0.7, 0.8], [0, 1]),
    ]
    found = outcome(trees, 0.5, 4)
    assert (found.kept_paths, found.kept_drafts, found.pruned) == (0.5, 0.5, 1 - 5 / 8)
    assert outcome(trees, 0.0, 4).kept_paths == 1.0
    assert outcome(trees, 0.0, 1).kept_paths == 0.0


def test_calibration_prunes_most_among_what_keeps_enough():
    sure = [SeenTree(TREE, [1.0, 0.9, 0.1, 0.8], [0, 1, 3])] * 19
    odd = [SeenTree(TREE, [1.0, 0.9, 0.1, 0.8], [0, 2])]
    found = calibrate(sure + odd, keep=0.95)
    assert (found.kept_paths, found.pruned) == (0.95, 0.25)
    assert calibrate(sure + odd, keep=1.0).pruned == 0.0
    with pytest.raises(InputError, match="no trees were drafted"):
        calibrate([])


def test_recorded_trees_are_those_that_were_verified():
    target = tiny_target()
    drafter = Streaming(tiny_speculator(target, pruning_layer=3), "deferred", top_k=2)
    trees = record_trees(target, drafter, [[3, 5, 8], [1, 2]], budget=6, limits=Limits(12))
    assert len(trees) >= 4
    for seen in trees:
        assert len(seen.tree) == len(seen.transitions) <= 6
        assert seen.path == seen.tree.path(seen.path[-1])
        assert all(0 <= value <= 1 for value in seen.transitions)


@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_the_segment_study_measures_every_kind(mode):
    target = tiny_target()
    target.model.float()
    config = tiny_speculator(target, mode=mode).config
    study = SegmentStudy(config, lengths=[16, 64], segments=[1, 4], repeats=1)
    rows = study.run(target, []).rows
    assert [(row["tokens"], row["segments"]) for row in rows] == [
        (length, kind) for length in (16, 64) for kind in (DENSE, 1, 4)
    ]
    peaks = {row["segments"]: row["peak MB"] for row in rows if row["tokens"] == 64}
    assert peaks[4] < 0.6 * peaks[DENSE]


def test_findings_are_written_as_record_table_and_picture(tmp_path):
    findings = OverheadStudy(4, 4, 64, 32).run(tiny_target(), [])
    write_findings(tmp_path, findings, {"a": 1}, tiny_target())
    content = json.loads((tmp_path / "findings.json").read_text())
    assert content["rows"] == findings.rows and content["config"] == {"a": 1}
    assert content["environment"]["versions"]["torch"] == torch.__version__
    assert "| Vicuna-33B | Medusa | 1,029,177,344 |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_markdown_tables():
    rows = [{"a": 1234567, "b": 0.123456, "c": None}, {"a": 2, "b": 12345.6, "c": "x"}]
    assert markdown(rows) == "| a | b | c |\n|---|---|---|\n| 1,234,567 | 0.123 | - |\n" + (
        "| 2 | 12,346 | x |\n"
    )
    assert Findings("t", rows, lambda figure: None).rows == rows


def test_a_step_runs_once_and_a_failing_one_names_its_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "make.py").write_text(
        "import pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[-1].removeprefix('output_dir='))\n"
        "assert sys.argv[1] == 'good=1'\n"
        "(folder / 'model').mkdir()\n"
    )
    folder = tmp_path / "run"
    assert run_step("make.py", ["good=1"], folder, "model") == folder / "model"
    (tmp_path / "make.py").unlink()
    assert run_step("make.py", ["good=1"], folder, "model") == folder / "model"
    with pytest.raises(InputError, match="made with other settings"):
        run_step("make.py", ["good=2"], folder, "model")
    (tmp_path / "make.py").write_text("assert False")
    with pytest.raises(InputError, match=r"bad=1.* failed; see .*log\.txt"):
        run_step("make.py", ["bad=1"], tmp_path / "other", "model")
    with pytest.raises(InputError, match="start it from the project's folder"):
        run_step("absent.py", [], tmp_path / "other", "model")


def test_a_speculator_for_a_study_is_checked():
    with pytest.raises(InputError, match="num_msa_layers"):
        SegmentStudy(StreamingConfig(num_msa_layers=9), [16], [1], 1).run(tiny_target(), [])
