"""Runs that are interrupted, anywhere, end as if they had not been, and their exit code says so.

SIGTERM is what a cluster sends, SIGINT is Ctrl-C.
"""

import csv
import signal
import subprocess
import sys
import time
from functools import cache

import pytest
import torch
from lightning.pytorch.trainer.connectors import signal_connector
from tests.commands import ROOT, config_of
from tests.exhaustive import sparing
from tests.training.worlds import STREAMS, make_world, overrides_of, train, weights
from torch.optim import AdamW

from slipstream import app
from slipstream.training.speculator import SpeculatorTraining
from slipstream.training.verifier import VerifierTraining


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def classify(world, output, *overrides):
    """Train a SPRINTER verifier or an acceptance head for up to eight epochs."""
    return app.train(
        config_of(
            "train", f"target.name={world}/target", f"training.draft.name={world}/draft",
            f"data.path={world}/rows", "data.regenerate=false", "data.max_new_tokens=4",
            f"training.cache_dir={world}/labels", "training.batch_size=64", "logger=csv",
            "training.learning_rate=0.05", "trainer.max_epochs=8", "callbacks.stopping.patience=2",
            "trainer.log_every_n_steps=1", f"output_dir={output}", *overrides,
        )
    )  # fmt: skip


def train_heads(world, output, *overrides):
    """Train Medusa heads, whose accuracies every validation measures anew."""
    own = [*overrides_of(world, output), "training.validation_prompts=2", "speculator=medusa"]
    return app.train(config_of("train", *own, "speculator.num_heads=2", *overrides))


TRAINED = {
    "medusa": (train_heads, SpeculatorTraining, []),
    "streaming": (train, SpeculatorTraining, ["trainer.val_check_interval=4"]),
    "accumulating": (train, SpeculatorTraining, ["trainer.accumulate_grad_batches=4"]),
    "sprinter": (classify, VerifierTraining, ["experiment=sprinter_small"]),
    "acceptance": (
        classify, VerifierTraining,
        ["experiment=acceptance_small", "trainer.accumulate_grad_batches=2"],
    ),
}  # fmt: skip


class Run:
    """One training, uninterrupted: the weights it ends with, and its number of batches."""

    def __init__(self, kind, world, output):
        self.train, self.module, self.own = TRAINED[kind]
        self.world = world
        self.whole = weights(self.watched(output, lambda number: None))
        self.num_batches = self.calls

    def watched(self, output, before, *overrides):
        """Train; `before` is called with the number of each training step."""
        step, self.calls = self.module.training_step, 0

        def counting(module, batch, number):
            self.calls += 1
            before(self.calls)
            return step(module, batch, number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.module, "training_step", counting)
            return self.train(self.world, output, *self.own, *overrides)


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """The run of a kind, made when it is first asked for."""
    return cache(lambda kind: Run(kind, world, tmp_path_factory.mktemp(kind)))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name == "streaming" else pytest.mark.exhaustive)
        for name in TRAINED
    ],
)
def run(request, whole):
    return whole(request.param)


@pytest.mark.parametrize(("share",), sparing(zip([0.3, 0.5, 0.7, 0.9]), lambda share: share == 0.5))
def test_ctrl_c_in_a_batch_loses_nothing(run, tmp_path, share):
    """Twice in the same run, and each time it goes on where it stopped."""

    def strike(number):
        if number == stop:
            raise KeyboardInterrupt

    stop = 1 + int(share * run.num_batches)
    with pytest.raises(SystemExit) as ended:
        run.watched(tmp_path, strike)
    assert ended.value.code == 130 and not (tmp_path / "model").exists()
    stop = 2
    with pytest.raises(SystemExit):
        run.watched(tmp_path, strike, "resume=auto")
    stop = None
    assert weights(run.watched(tmp_path, strike, "resume=auto")) == run.whole


@pytest.fixture(scope="module")
def streaming(whole):
    return whole("streaming")


SIGNALS = [
    (name, code, share)
    for name, code in (("SIGTERM", 143), ("SIGINT", 130))
    for share in (0, 0.5, 0.51, 1)
]


@pytest.mark.parametrize(
    ("name", "code", "share"),
    sparing(SIGNALS, lambda name, _, share: (name, share) == ("SIGTERM", 1)),
)
def test_a_signal_waits_for_the_end_of_the_batch(streaming, tmp_path, capsys, name, code, share):
    """Also in the first and the last batch of an epoch, and in the last of the run."""
    before = signal.getsignal(signal.SIGINT)
    stop = max(1, round(share * streaming.num_batches + 0.4 * (share == 0.51)))

    def strike(number):
        if number == stop:
            signal.raise_signal(getattr(signal, name))

    with pytest.raises(SystemExit) as ended:
        streaming.watched(tmp_path, strike)
    assert ended.value.code == code and not (tmp_path / "model").exists()
    assert signal.getsignal(signal.SIGINT) is before
    state = tmp_path / "checkpoints" / "interrupted.ckpt"
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.endswith(f"output_dir={tmp_path} and resume=auto")
    assert torch.load(state, weights_only=True)["global_step"] == stop
    resumed = streaming.watched(tmp_path, lambda number: None, "resume=auto")
    assert weights(resumed) == streaming.whole


@pytest.mark.exhaustive
def test_slurm_asks_for_a_job_within_a_step(streaming, tmp_path, monkeypatch):
    """What is saved has whole steps; `resume` alone says whether it is gone on from, and a new run
    removes it."""
    for name, value in {
        "JOB_ID": 1,
        "NTASKS": 1,
        "PROCID": 0,
        "LOCALID": 0,
        "JOB_NAME": "x",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    asked = []
    monkeypatch.setattr(signal_connector, "call", lambda command: asked.append(command) or 0)
    monkeypatch.setattr(
        AdamW, "step", striking(AdamW.step, lambda: not asked and streaming.calls == 3)
    )

    def end(number):
        if number == 4:
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        streaming.watched(tmp_path, end)
    saved = tmp_path / "hpc_ckpt_1.ckpt"
    assert asked == [["scontrol", "requeue", "1"]]
    resumed = streaming.watched(tmp_path, lambda number: None, f"resume={saved}")
    assert streaming.calls == streaming.num_batches - 3 and weights(resumed) == streaming.whole
    assert saved.exists()
    assert weights(streaming.watched(tmp_path, lambda number: None)) == streaming.whole
    assert streaming.calls == streaming.num_batches and not saved.exists()


def striking(step, now):
    """An optimiser's step with SIGUSR1 in its middle: weights are changed, counts are not."""

    def struck(*args, **kwargs):
        result = step(*args, **kwargs)
        if now():
            signal.raise_signal(signal.SIGUSR1)
        return result

    return struck


def test_a_validation_that_is_broken_off_is_repeated(world, tmp_path, monkeypatch):
    whole = Run("sprinter", world, tmp_path / "whole")
    step, calls = whole.module.validation_step, []

    def counting(module, *batch):
        calls.append(batch)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return step(module, *batch)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(whole.module, "validation_step", counting)
        whole.watched(tmp_path / "run", lambda number: None)
    resumed = whole.watched(tmp_path / "run", lambda number: None, "resume=auto")
    assert weights(resumed) == whole.whole
    told = [(tmp_path / name / "metrics" / "metrics.csv").read_text() for name in ("whole", "run")]
    assert told[1].splitlines()[-1].split(",")[1:] == told[0].splitlines()[-1].split(",")[1:]


@pytest.mark.exhaustive
def test_train_py_saves_on_sigterm_and_goes_on(world, tmp_path):
    """The script: exit code 143, the checkpoint, the line that says how to go on."""
    common = ["trainer.max_epochs=null", "trainer.max_steps=40", "callbacks.best=null"]
    own = [*overrides_of(world, tmp_path / "out"), *STREAMS]
    command = [sys.executable, str(ROOT / "train.py"), *own, *common]
    started = subprocess.Popen(
        command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    state = tmp_path / "out" / "checkpoints" / "interrupted.ckpt"
    deadline = time.monotonic() + 120
    while not (state.parent / "last.ckpt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    started.terminate()
    printed = started.communicate(timeout=60)[0]
    assert started.returncode == 143
    said = printed.strip().splitlines()[-1]
    assert said.endswith(f"output_dir={tmp_path / 'out'} and resume=auto")
    assert not (tmp_path / "out" / "model").exists()
    assert torch.load(state, weights_only=True)["global_step"] < 40
    resumed = train(world, tmp_path / "out", *common, f"resume={state}")
    assert weights(resumed) == weights(train(world, tmp_path / "whole", *common))


def logged(output) -> list[dict[str, str]]:
    with (output / "metrics" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.exhaustive
def test_the_log_of_the_first_part_stays(streaming, tmp_path):
    def strike(number):
        if number == 9:
            raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        streaming.watched(tmp_path, strike)
    before = logged(tmp_path)
    streaming.watched(tmp_path, lambda number: None, "resume=auto")
    after = logged(tmp_path)
    assert before and after[: len(before)] == before and len(after) > len(before)
