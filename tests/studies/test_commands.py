"""Steps of studies that are commands of their own."""

import pandas as pd
import pytest
from studies import applications
from studies.applications import measured, run_step

from slipstream.core.errors import InputError


def test_a_step_runs_once_and_a_failing_one_names_its_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "make.py").write_text(
        "import pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[-1].removeprefix('output_dir='))\n"
        "assert sys.argv[1] == 'good=1'\n"
        "(folder / 'model').mkdir()\n"
    )
    folder, known = tmp_path / "run", ["abc"]
    monkeypatch.setattr(applications, "commit", lambda: known[-1])
    assert run_step("make.py", ["good=1"], folder, "model") == folder / "model"
    (folder / "model").rmdir()  # and again where what it made is gone
    assert run_step("make.py", ["good=1"], folder, "model").is_dir()
    (tmp_path / "make.py").unlink()
    assert run_step("make.py", ["good=1"], folder, "model") == folder / "model"
    with pytest.raises(InputError, match="made with other settings"):
        run_step("make.py", ["good=2"], folder, "model")
    known.append("abc+changes")  # which may be any
    with pytest.raises(InputError, match="with changes that no commit has"):
        run_step("make.py", ["good=1"], folder, "model")
    (tmp_path / "make.py").write_text("assert False")
    with pytest.raises(InputError, match=r"bad=1.* failed; see .*log\.txt"):
        run_step("make.py", ["bad=1"], tmp_path / "other", "model")
    with pytest.raises(InputError, match="start it from the project's folder"):
        run_step("absent.py", [], tmp_path / "other", "model")


def test_speed_and_tau_of_an_application_have_paired_intervals():
    """The second method takes half of the baseline's time for every row, whatever is drawn."""
    answer = dict(identical=True, rouge_1=70.0, rouge_lsum=60.0, exact_match=0.0)
    lines = pd.DataFrame(
        dict(
            answer, method=method, seed=seed, row=row, tokens=9, tau=tau,
            seconds=(1 + row + seed) * factor,
        )
        for method, factor, tau in (("baseline", 1.0, 1.0), ("lossless", 0.5, 2.0 ))
        for seed in (0, 1)
        for row in ((0, 1, 2) if method == "baseline" else (2, 0, 1))
    )  # fmt: skip
    row = measured(lines, "lossless", "rouge_lsum")
    assert (row["speedup"], row["speedup, 95 %"]) == (2.0, "2.00")
    assert (row["tau"], row["tau, 95 %"]) == (2.0, "2.00")
    assert (row["difference"], row["difference, 95 %"]) == (0.0, "+0.00 to +0.00 (rouge_lsum)")
