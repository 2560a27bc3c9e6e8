"""The estimate of a step's memory against what the step holds, and what is said without memory."""

import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.commands import config_of, refused
from tests.exhaustive import sparing
from tests.training.worlds import MODES, STREAMS, make_world, overrides_of

from slipstream import app
from slipstream.core.errors import InputError
from slipstream.training import callbacks
from slipstream.training.memory import PeakMemory, largest_batch
from slipstream.training.run import start
from slipstream.training.sharding import ShardedTarget


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize(
    ("segments", "mode"),
    sparing(
        product(("null", "2"), ("lossless", "skipping", "pairs", "shared", "medusa")),
        lambda segments, mode: (
            mode != "lossless" and (segments == "null") == (mode in ("skipping", "medusa"))
        ),
    ),
)
def test_the_estimate_is_what_the_step_holds(world, tmp_path, mode, segments, monkeypatch):
    own = ["speculator=medusa"] if mode == "medusa" else [*STREAMS, *MODES[mode]]
    own += [f"training.num_segments={segments}", "training.validation_prompts=2"]
    compare(world, tmp_path, monkeypatch, own)


def test_the_estimate_knows_lora(world, tmp_path, monkeypatch):
    compare(world, tmp_path, monkeypatch, ["experiment=fine_tuning"])


def compare(world, output, monkeypatch, own):
    """Of the same batch, the real step, counted storage by storage; and an estimate where four
    processes share the target's layers."""
    found = {}

    def counted(trainer, module):
        batch = largest_batch(trainer.datamodule.train_dataloader(), 1)
        with PeakMemory() as memory:
            module.losses(batch, 0)[0].backward()
        module.zero_grad(set_to_none=True)
        held = max(memory.peak, module.validation_bytes())
        found["held"], found["estimate"] = held, usual(trainer, module)
        with monkeypatch.context() as patched:
            patched.setattr(callbacks, "sharers", lambda _: 4)
            found["sharded"] = usual(trainer, module)
            layers = module.target.family.layers.parameters()
            found["layers"] = sum(p.nbytes for p in layers)
        raise InputError("seen")

    usual = callbacks.memory_estimate
    monkeypatch.setattr(callbacks, "memory_estimate", counted)
    with pytest.raises(InputError, match="seen"):
        app.train(config_of("train", *overrides_of(world, output), *own))
    assert found["held"] > 10_000
    estimate, sharded = found["estimate"], found["sharded"]
    assert estimate.step == pytest.approx(found["held"], rel=0.02)
    layers = found["layers"]
    assert sharded.weights == estimate.weights - layers + layers // 4 and layers > 10_000


def test_a_target_that_processes_share_is_said_to_be_shared(monkeypatch, capsys):
    data = SimpleNamespace(samples={"train": [None]}, supervised_share=0.5, tokenizer=None)
    data.train_dataloader = lambda: []
    monkeypatch.setattr(callbacks, "total_steps", lambda *_: 3)
    strategy = ShardedTarget.__new__(ShardedTarget)
    trainer = SimpleNamespace(strategy=strategy, world_size=4, is_global_zero=True)
    trainer.limit_train_batches = 1.0
    monkeypatch.setattr(callbacks, "memory_estimate", lambda *_: "1.00 GiB")
    monkeypatch.setattr(callbacks, "_masked", lambda *_: "")
    module = torch.nn.Linear(2, 2)
    module.data = data
    module.runs_target, module.warmup_steps = True, 2
    callbacks.RunSummary().on_fit_start(trainer, module)
    said = capsys.readouterr().out
    assert "1.00 GiB, its layers over 4 processes" in said and "note: 3 steps are few" in said
    trainer.strategy = None
    callbacks.RunSummary().on_fit_start(trainer, module)
    assert "shared" not in capsys.readouterr().out


class _Failing:
    """A trainer whose run ends with this error."""

    world_size = 1

    def __init__(self, error: BaseException):
        self.error = error

    def fit(self, *_, **__):
        raise self.error


@pytest.mark.parametrize("kind", ["device", "cpu"])
def test_a_run_without_memory_says_what_to_lower(kind):
    if kind == "device":
        error: BaseException = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    else:
        with pytest.raises(RuntimeError) as caught:
            torch.empty(2**58, dtype=torch.uint8)
        error = caught.value
    with pytest.raises(InputError, match=r"lower data\.batch_tokens .* training\.checkpointing"):
        start(_Failing(error), None, None, None, Path())


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("transformers.AutoModelForCausalLM.from_pretrained", r"target: .*target\.device_map=auto"),
        ("torch.nn.Module.to", r"target: .*target\.device_map=auto"),
        ("slipstream.data.regeneration.Regeneration.samples", r"data\.regeneration\.memory_gib: "),
    ],
)
def test_memory_that_ends_before_training_is_one_sentence(
    world, tmp_path, monkeypatch, place, said
):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    config = config_of("train", *overrides_of(world, tmp_path), *STREAMS, "data.regenerate=true")
    monkeypatch.setattr(place, full)
    assert re.match(said, refused(lambda: app.train(config)))


def test_no_other_error_is_taken_for_it():
    error = RuntimeError("the file 'out of memory.txt' is missing")
    with pytest.raises(RuntimeError, match="is missing") as caught:
        start(_Failing(error), None, None, None, Path())
    assert caught.value is error
