"""The estimate of a step's memory against what the step holds, and what is said without memory."""

from pathlib import Path

import pytest
import torch
from tests.commands import config_of
from tests.training.worlds import MODES, STREAMS, make_world, overrides_of

from slipstream import app
from slipstream.core.errors import InputError
from slipstream.training import callbacks
from slipstream.training.memory import PeakMemory, largest_batch
from slipstream.training.run import start


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("segments", ["null", "2"])
@pytest.mark.parametrize("mode", ["lossless", "skipping", "pairs", "medusa"])
def test_the_estimate_is_what_the_step_holds(world, tmp_path, mode, segments, monkeypatch):
    """Of the same batch, the real step, counted storage by storage."""
    found = {}

    def counted(trainer, module):
        batch = largest_batch(trainer.datamodule.train_dataloader())
        with PeakMemory() as memory:
            module.losses(batch, 0)[0].backward()
        module.zero_grad(set_to_none=True)
        found["held"], found["estimate"] = memory.peak, usual(trainer, module).step
        raise InputError("seen")

    usual = callbacks.memory_estimate
    monkeypatch.setattr(callbacks, "memory_estimate", counted)
    own = ["speculator=medusa"] if mode == "medusa" else [*STREAMS, *MODES[mode]]
    own += [f"training.num_segments={segments}", "training.validation_prompts=2"]
    with pytest.raises(InputError, match="seen"):
        app.train(config_of("train", *overrides_of(world, tmp_path), *own))
    assert found["held"] > 10_000
    assert found["estimate"] == pytest.approx(found["held"], rel=0.02)


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


def test_no_other_error_is_taken_for_it():
    error = RuntimeError("the file 'out of memory.txt' is missing")
    with pytest.raises(RuntimeError, match="is missing") as caught:
        start(_Failing(error), None, None, None, Path())
    assert caught.value is error
