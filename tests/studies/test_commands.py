"""Steps of studies that are commands of their own."""

import pytest
from studies.applications import run_step

from slipstream.core.errors import InputError


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
