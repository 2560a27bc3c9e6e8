"""Checkpoint files are whole, and what was trained is finite."""

import errno
import os
import tempfile
from types import SimpleNamespace
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tests.commands import config_of, refused
from tests.exhaustive import sparing
from tests.training.test_interrupted import classify
from tests.training.worlds import STREAMS, make_world, overrides_of, train, weights

from slipstream import app
from slipstream.core.files import load_tensors
from slipstream.speculators.checkpoint import load_speculator
from slipstream.targets.loading import load_target
from slipstream.training import run
from slipstream.training.callbacks import StopWhenNotFinite
from slipstream.training.run import lightning_in_one_sentence
from slipstream.training.speculator import SpeculatorTraining

SPRINTER = "experiment=sprinter_small"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def test_a_full_disk_leaves_the_checkpoints_before(world, tmp_path, monkeypatch):
    """The disk is full from the third of four writes on; also that of `interrupted.ckpt` fails."""
    save, calls = torch.save, []

    def saving(content, file):
        calls.append(content)
        if len(calls) < 3:
            return save(content, file)
        file.write(b"half of a checkpoint")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", saving)
    text = refused(lambda: train(world, tmp_path))
    assert "No space left" in text and f"output_dir={tmp_path} and resume=auto" in text
    folder = tmp_path / "checkpoints"
    assert len(calls) == 4 and sorted(os.listdir(folder)) == ["best.ckpt", "last.ckpt"]
    for path in folder.iterdir():
        assert torch.load(path, weights_only=True)["global_step"] == 2


def test_checkpoints_need_no_room_in_the_temporary_folder(world, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    train(world, tmp_path, "trainer.max_steps=2", "trainer.val_check_interval=1")
    files = ["best.ckpt", "finished.json", "last.ckpt"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == files


def fine_tune(world, output, *overrides):
    own = overrides_of(world, output)
    return app.train(config_of("train", "experiment=fine_tuning", *own, *overrides))


@pytest.mark.parametrize(
    ("call", "own"),
    sparing(
        [
            (train, []),
            (train, ["trainer.precision=bf16-mixed", "trainer.accumulate_grad_batches=2"]),
            (train, ["speculator=streaming_shared"]),
            (fine_tune, []),
            (classify, [SPRINTER]),
        ],
        lambda call, own: call is not train,  # whose loss the next test spoils
    ),
)
def test_a_loss_that_is_not_finite_stops_the_run(world, tmp_path, call, own):
    """A step of this size leaves numbers whose products overflow."""
    text = refused(lambda: call(world, tmp_path, *own, "training.learning_rate=1e37"))
    assert text.startswith("training: the ") and "is NaN or infinite" in text
    assert "training.learning_rate" in text and not (tmp_path / "model").exists()


@pytest.mark.parametrize(("number",), sparing([(1,), (3,)], lambda number: number == 3))
def test_no_step_is_taken_with_gradients_that_are_not_finite(world, tmp_path, monkeypatch, number):
    """The weights are those of the step before, and the earlier checkpoints stay."""
    step, seen = SpeculatorTraining.training_step, []

    def spoiled(module, batch, place):
        seen.append([p.detach().clone() for p in module.speculator.parameters()])
        loss = step(module, batch, place)
        return loss * torch.nan if len(seen) == number else loss

    def on_exception(callback, trainer, module, error):
        trained = zip(module.speculator.parameters(), seen[-1], strict=True)
        assert all(parameter.equal(before) for parameter, before in trained)

    monkeypatch.setattr(SpeculatorTraining, "training_step", spoiled)
    monkeypatch.setattr(StopWhenNotFinite, "on_exception", on_exception)
    state = tmp_path / "checkpoints" / "last.ckpt"
    text = refused(lambda: train(world, tmp_path))
    assert f"the loss of step {number} is NaN" in text and len(seen) == number
    assert state.exists() == (number > 2) and not (tmp_path / "model").exists()


def test_weights_that_are_not_finite_are_not_saved(world, tmp_path, monkeypatch):
    """Of a last step, after which no loss is computed."""

    def spoil(module):
        module.speculator.pruning.up.data[0] = torch.inf

    monkeypatch.setattr(SpeculatorTraining, "on_train_end", spoil)
    own = ["trainer.max_steps=1", "callbacks.best=null", "callbacks.last=null"]
    text = refused(lambda: train(world, tmp_path, *own))
    assert text.startswith("training: it ended with NaN or infinity in speculator.")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "own, field",
    [
        (["training.learning_rate=nan"], "training.learning_rate"),
        (["training.learning_rate=-1"], "training.learning_rate"),
        (["training.weight_decay=inf"], "training.weight_decay"),
        (["speculator.stream_weights=[1,nan]"], "speculator.stream_weights"),
        (["speculator=streaming_shared", "speculator.main_weight=inf"], "speculator.main_weight"),
        (["training.lora_learning_rate=nan"], "training.lora_learning_rate"),
        (["trainer.gradient_clip_val=nan"], "trainer.gradient_clip_val"),
    ],
)
def test_settings_that_are_not_finite(world, tmp_path, own, field):
    assert refused(lambda: train(world, tmp_path, *own)).startswith(f"{field}: ")


def test_a_classifier_of_infinite_learning_rate(world, tmp_path):
    text = refused(lambda: classify(world, tmp_path, SPRINTER, "training.learning_rate=inf"))
    assert text.startswith("training.learning_rate: ")


def test_a_fault_in_code_is_no_matter_of_settings(tmp_path):
    trainer = L.Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu")
    with (
        pytest.raises(MisconfigurationException, match="training_step"),
        lightning_in_one_sentence({"max_steps": 3}),
    ):
        trainer.fit(L.LightningModule())


def test_what_lightning_refuses_is_one_sentence(world, tmp_path, capsys):
    text = refused(lambda: train(world, tmp_path, "trainer.accelerator=gpu", "target.name=none"))
    assert text.startswith("trainer.accelerator: ")
    text = refused(lambda: train(world, tmp_path, "trainer.val_check_interval=1000"))
    assert "interrupted" not in capsys.readouterr().out
    assert text.startswith("trainer.val_check_interval: ") and "1000" in text
    text = refused(lambda: train(world, tmp_path, "trainer.val_check_interval=1000", "check=true"))
    assert text.startswith("trainer.val_check_interval: 1000 is more than the ")


def test_a_run_that_time_alone_ends_is_refused_before_anything_is_opened(world, tmp_path):
    given = "trainer.max_epochs=null", "trainer.max_time=00:00:01:00", "target.name=none"
    text = refused(lambda: train(world, tmp_path, *given))
    assert text.startswith("trainer.max_epochs, trainer.max_steps: set one of them")


CALLBACK = "+callbacks.own._target_=lightning.pytorch.callbacks."
SCHEDULER = f"{CALLBACK}GradientAccumulationScheduler", "+callbacks.own.scheduling={0:2}"


@pytest.mark.parametrize(
    "given, said",
    [
        (["+trainer.logger=false"], "trainer.logger: it is not read here; give logger=NAME"),
        (["+trainer.callbacks=[]"], "trainer.callbacks: it is not read here"),
        (["+trainer.overfit_batches=1"], "trainer.overfit_batches: every epoch has other batches"),
        (SCHEDULER, "callbacks: with GradientAccumulationScheduler a run could not"),
        ([f"{CALLBACK}EMAWeightAveraging"], "callbacks: with EMAWeightAveraging a run could not"),
        (
            ["trainer.devices=2", "trainer.strategy=ddp_spawn"],
            "trainer.strategy: what processes of its kind learn",
        ),
        (["callbacks.best.monitor=nothing"], "callbacks: `ModelCheckpoint(monitor='nothing')`"),
        (
            [f"{CALLBACK}EarlyStopping", "+callbacks.own.monitor=nothing"],
            "callbacks: Early stopping conditioned on metric `nothing`",
        ),
    ],
)
def test_what_lightning_has_and_training_here_does_not_do(world, tmp_path, given, said):
    assert refused(lambda: train(world, tmp_path, *given)).startswith(said)


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_processes_that_would_each_train_alone_are_refused(world, tmp_path, monkeypatch, variable):
    """Of torchrun or srun, without trainer.devices."""
    monkeypatch.setenv(variable, "2")
    found = refused(lambda: train(world, tmp_path))
    assert found.startswith("trainer.devices, trainer.num_nodes: 2 processes were started")


def test_a_logger_may_be_left_out(world, tmp_path):
    given = "logger=default", "logger.wandb=null", "trainer.max_steps=1"
    assert train(world, tmp_path, *given).is_dir()


def test_what_wandb_refuses_is_one_sentence(world, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    text = refused(lambda: train(world, tmp_path, "logger=default", "logger.wandb.project=my/own"))
    assert text.startswith("logger.wandb: ") and "my/own" in text
    monkeypatch.setenv("WANDB_MODE", "of")
    text = refused(lambda: train(world, tmp_path, "logger=default"))
    assert text.startswith("logger.wandb: ") and "'offline'" in text


def test_few_rows_are_enough_for_a_quick_look(world, tmp_path):
    config = config_of(
        "train", "debug=quick", f"target.name={world}/target", f"data.path={world}/rows",
        "data.regenerate=false", "data.max_train_rows=2", "logger=csv", f"output_dir={tmp_path}",
        *STREAMS,
    )  # fmt: skip
    app.train(config)
    assert load_tensors(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 4


def test_a_foreign_model_folder_is_refused_before_anything_is_loaded(world, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("kept")
    text = refused(lambda: train(world, tmp_path, "target.name=none"))
    assert text.startswith("output_dir: ") and "no speculator" in text
    assert os.listdir(tmp_path / "model") == ["notes.txt"]


def test_a_foreign_config_makes_no_model_of_ours(world, tmp_path):
    """Also where what is trained is no speculator."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tsconfig.json").write_text("{}")
    config = config_of("train", "experiment=fine_tuning", "target.name=none", "logger=csv",
                       f"output_dir={tmp_path}")  # fmt: skip
    assert refused(lambda: app.train(config)).startswith("output_dir: ")
    assert os.listdir(tmp_path / "model") == ["tsconfig.json"]


def test_a_run_without_a_step_saves_nothing(world, tmp_path):
    text = refused(lambda: train(world, tmp_path, "trainer.max_time='00:00:00:00'"))
    assert text.startswith("trainer: no step was taken") and not (tmp_path / "model").exists()


def test_a_run_in_the_same_folder_replaces_its_speculator(world, tmp_path):
    short = "trainer.max_steps=2", "trainer.val_check_interval=1"
    before = weights(train(world, tmp_path, *short))
    theirs = tmp_path / "checkpoints" / "theirs.ckpt"  # of sharded checkpoints, say
    theirs.mkdir()
    folder = train(world, tmp_path, *short, "seed=1")
    assert theirs.is_dir()
    assert weights(folder) != before
    target = load_target(str(world / "target"))
    assert load_speculator(folder, target).num_streams == 2


@pytest.mark.parametrize(("score", "warned"), [(1.0, True), (1.5, False)])
def test_a_speculator_whose_drafts_are_refused_says_so(
    tmp_path, monkeypatch, capsys, score, warned
):
    best = dict(best_model_path="best.ckpt", best_model_score=torch.tensor(score))
    kept = SimpleNamespace(monitor="validation/tau", **best)
    trainer = SimpleNamespace(global_step=1, is_global_zero=True, checkpoint_callback=kept)
    trainer.loggers, module = [], Mock()
    module.named_parameters.return_value = []
    monkeypatch.setattr(torch, "load", lambda *_, **__: {"state_dict": {}})
    monkeypatch.setattr(run, "card", lambda *_: "")
    run.finish(trainer, module, tmp_path, {})
    assert ("warning: hardly any draft is accepted" in capsys.readouterr().out) == warned
