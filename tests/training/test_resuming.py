"""resume=auto: what a run goes on from, what it refuses, and when there is nothing left to do."""

import csv
import os
import shutil
import signal
import threading

import pytest
from tests.commands import config_of, refused
from tests.exhaustive import sparing
from tests.training.worlds import make_world, overrides_of, weights

from slipstream import app
from slipstream.core.files import load_tensors, locked, save_tensors
from slipstream.data.prompt_completion import PromptCompletionData
from slipstream.data.refill import OwnAnswers
from slipstream.training.resuming import state_of
from slipstream.training.speculator import SpeculatorTraining


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"), num_rows=8)


def train(world, output, *overrides):
    own = [
        *overrides_of(world, output), "speculator=medusa",
        "training.validation_prompts=1", "trainer.max_epochs=1", "callbacks.summary=null",
    ]  # fmt: skip
    return app.train(config_of("train", *own, "resume=auto", *overrides))


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory):
    return train(world, tmp_path_factory.mktemp("run") / "out").parent


def test_a_finished_run_says_so_and_changes_nothing(world, finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    assert train(world, finished) == finished / "model"
    assert "nothing is left to do" in capsys.readouterr().out.splitlines()[-1]
    assert before == {
        path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize(
    ("other", "named"),
    sparing(
        [
            ("training.learning_rate=0.02", "training.learning_rate=0.01, and this one has 0.02"),
            ("seed=1", "seed=0, and this one has 1"),
            ("data.max_train_rows=7", "data.max_train_rows=6000, and this one has 7"),
            ("data.path={world}/rows/train.jsonl", "data=16 samples"),
            ("target.dtype=bfloat16 trainer.precision=bf16-mixed", "target="),
            ("speculator=streaming_paper", "speculator.kind=medusa, and"),
        ],
        lambda other, named: "6000" not in named and not other.startswith("seed"),
    ),
)
def test_what_differs_is_refused_by_name_before_the_first_step(
    world, finished, monkeypatch, other, named
):
    """And before prompts are answered, unless these are what differs; once also without the note
    that says that the run has ended."""
    if not named.startswith("data="):
        monkeypatch.setattr(PromptCompletionData, "prepare", None)
    other = other.format(world=world)
    note = finished / "checkpoints" / "finished.json"
    said = note.read_text()
    kept = finished / "model" / "model.safetensors", finished / "metrics" / "metrics.csv"
    before = [path.read_bytes() for path in kept]
    for note_there in (True, False) if named.startswith("training.") else (True,):
        if not note_there:
            note.unlink()
        try:
            text = refused(lambda: train(world, finished, *other.split()))
        finally:
            note.write_text(said)
        assert text.startswith("resume: that run had ") and named in text
    assert [path.read_bytes() for path in kept] == before


def test_the_newest_whole_checkpoint_is_taken(finished, tmp_path, capsys):
    state = load_tensors(finished / "checkpoints" / "last.ckpt")
    for name, steps in (("last", 4), ("interrupted", 5), ("best", 2)):
        save_tensors(tmp_path / "checkpoints" / f"{name}.ckpt", state | {"global_step": steps})
    newest = tmp_path / "checkpoints" / "interrupted.ckpt"
    assert state_of("auto", tmp_path) == newest
    newest.write_bytes(newest.read_bytes()[:-20])
    assert state_of("auto", tmp_path) == tmp_path / "checkpoints" / "last.ckpt"
    assert f"{newest} is no whole checkpoint" in capsys.readouterr().out
    assert "no whole checkpoint" in refused(lambda: state_of(str(newest), tmp_path))
    assert state_of("auto", tmp_path / "none") is None and state_of(None, tmp_path) is None


@pytest.mark.parametrize("spoilt", ["run", "missing", "renamed", "shape"])
def test_a_checkpoint_of_something_else_is_refused(world, finished, tmp_path, spoilt):
    state = load_tensors(finished / "checkpoints" / "last.ckpt")
    tensors = state["state_dict"]
    name = min(tensors)
    if spoilt == "run":
        del state["run"]
    else:
        tensor = tensors.pop(name)
        tensors |= {"renamed": {f"{name}_": tensor}, "shape": {name: tensor[:1]}}.get(spoilt, {})
    save_tensors(tmp_path / "other.ckpt", state)
    text = refused(lambda: train(world, tmp_path / "out", f"resume={tmp_path}/other.ckpt"))
    assert text.startswith("resume: ") and ("run" if spoilt == "run" else name) in text


def test_sigterm_while_the_target_answers(world, tmp_path, monkeypatch, capsys):
    answer, before = OwnAnswers.answer, signal.getsignal(signal.SIGTERM)

    def struck(*given):
        yield next(answer(*given))
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(5)

    own = ["data.regenerate=true", f"data.cache_dir={tmp_path}/answers"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(OwnAnswers, "answer", struck)
        train(world, tmp_path / "out", *own)
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) is before
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.endswith(f"output_dir={tmp_path}/out and resume=auto")
    assert list((tmp_path / "answers").glob("*.part-0.jsonl"))


def test_a_second_run_in_the_same_folder_is_refused(world, tmp_path):
    with locked(tmp_path / ".lock", "x"):
        text = refused(lambda: train(world, tmp_path, "target.name=none"))
    assert text.startswith("output_dir: another process is writing to ")


def test_more_processes_than_cores_are_refused(world, tmp_path):
    own = "trainer.devices=500", "trainer.strategy=ddp", "trainer.accelerator=cpu"
    text = refused(lambda: train(world, tmp_path, *own, "target.name=none"))
    assert text.startswith("trainer.devices: 500 processes on a CPU")


@pytest.mark.parametrize("interval", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_a_finished_run_whose_folder_is_gone_writes_it_again(world, tmp_path, interval):
    """Also one whose last validation comes after no whole interval."""
    own = "data.batch_tokens=32", f"trainer.val_check_interval={interval}"
    model = train(world, tmp_path / "out", *own)
    before, last = weights(model), tmp_path / "out" / "checkpoints" / "last.ckpt"
    steps = load_tensors(last)["global_step"]
    shutil.rmtree(model)
    assert train(world, tmp_path / "out", "resume=auto", *own) == model
    assert weights(model) == before and load_tensors(last)["global_step"] == steps


def with_taus(patch, *taus: float) -> None:
    """What validations find, one after the other."""
    left = iter(taus)
    patch.setattr(
        SpeculatorTraining,
        "on_validation_epoch_end",
        lambda module: module.log("validation/tau", next(left), prog_bar=True),
    )


OFTEN = "data.batch_tokens=16", "trainer.num_sanity_val_steps=0"


@pytest.fixture(scope="module")
def moved(world, tmp_path_factory):
    """Three quarters of a run, in another folder than it was made in."""
    folder = tmp_path_factory.mktemp("moved")
    with pytest.MonkeyPatch.context() as patch:
        with_taus(patch, 1.0, 3.0, 2.0)
        train(world, folder / "one", "trainer.max_steps=6", *OFTEN)
    return (folder / "one").rename(folder / "two")


@pytest.mark.parametrize("best", ["moved", "damaged", "gone"])
def test_a_run_may_move_and_its_best_state_with_it(
    world, moved, tmp_path, monkeypatch, capsys, best
):
    """The second of four states is best; without its file the best of what follows is kept."""
    run = shutil.copytree(moved, tmp_path / "two")
    path = run / "checkpoints" / "best.ckpt"
    if best == "damaged":
        path.write_bytes(path.read_bytes()[:-20])
    elif best == "gone":
        path.unlink()
    with_taus(monkeypatch, 2.5)
    train(world, run, *OFTEN)
    assert load_tensors(path)["global_step"] == (4 if best == "moved" else 8)
    score = "3.000" if best == "moved" else "2.500"
    assert f"(best state, {score})" in capsys.readouterr().out.splitlines()[-1]
    assert not moved.with_name("one").exists()


def test_without_a_best_state_the_last_one_is_saved(world, tmp_path):
    """Not that of the last validation."""
    given = "callbacks.best=null", "trainer.max_steps=3"
    often = train(world, tmp_path / "often", "trainer.val_check_interval=1", *given)
    assert weights(train(world, tmp_path / "seldom", *given)) == weights(often)


@pytest.mark.parametrize("until", ["max_steps=3", "max_epochs=1 trainer.val_check_interval=3"])
def test_the_last_step_is_validated_too(world, tmp_path, until):
    """Of two batches of an epoch there are more than the interval is long."""
    train(world, tmp_path / "out", "data.batch_tokens=32", *f"trainer.{until}".split())
    with (tmp_path / "out" / "metrics" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    validated = [int(row["step"]) for row in rows if row.get("validation/tau")]
    last = max(int(row["step"]) for row in rows)
    assert validated[-1] == last and len(validated) == len(set(validated)) > 1


def test_a_run_goes_on_after_epochs_that_end_before_their_last_batch(world, tmp_path):
    """With the next epoch, not with what was left of the one before."""
    given = [
        "callbacks.best=null", "data.batch_tokens=32", "+trainer.limit_train_batches=2",
        "trainer.val_check_interval=1", "trainer.max_epochs=-1", "trainer.max_steps=6",
        "+callbacks.all._target_=lightning.pytorch.callbacks.ModelCheckpoint",
        "+callbacks.all.every_n_train_steps=1", "+callbacks.all.save_top_k=-1",
        f"+callbacks.all.dirpath={tmp_path}/all",
    ]  # fmt: skip
    whole = train(world, tmp_path / "whole", *given)
    state = next((tmp_path / "all").glob("*step=4.ckpt"))
    again = train(world, tmp_path / "again", *given, f"resume={state.as_posix()!r}")
    assert weights(again) == weights(whole)


def test_the_rate_falls_to_zero_however_few_steps_there_are(world, tmp_path):
    """Of four steps two warm up, though more were asked for."""
    train(world, tmp_path / "out", "training.warmup_steps=20", "data.batch_tokens=32")
    schedule = load_tensors(tmp_path / "out" / "checkpoints" / "last.ckpt")["lr_schedulers"][0]
    assert schedule["_last_lr"][0] == 0.0


def test_prompts_that_are_trained_on_and_validated_are_counted(world, tmp_path, caplog):
    """As with one file for both."""
    own = f"data.path={world}/rows/train.jsonl", "trainer.max_steps=1"
    train(world, tmp_path / "out", *own)
    assert "8 of 8 validation prompts are trained on as well" in caplog.text
    caplog.clear()
    train(world, tmp_path / "apart", "trainer.max_steps=1")
    assert "trained on as well" not in caplog.text
