"""Training a speculator for a bfloat16 target: validation decodes with a copy."""

import copy

import pytest
import safetensors.torch
import torch
from tests.exhaustive import sparing
from tests.tiny import tiny_speculator, tiny_target
from tests.training.worlds import MODES, make_world, train, weights

from slipstream.drafters.streaming import Streaming


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize(("mode",), sparing(zip(MODES), lambda mode: mode == "shared"))
def test_training_goes_on_in_float32_after_validations(world, tmp_path, mode):
    """Three validations before the last step; a run from the state of one of them equals it."""
    common = [
        f"target.name={world}/bfloat16", "target.dtype=bfloat16", "trainer.precision=bf16-mixed",
        "trainer.max_epochs=1", *MODES[mode],
    ]  # fmt: skip
    keep = [
        "callbacks.best=null",  # the last state is saved
        "callbacks.last.filename='state-{step}'",
        "+callbacks.last.auto_insert_metric_name=false",
        "+callbacks.last.save_top_k=-1",
    ]
    whole = train(world, tmp_path / "whole", *common, *keep)
    tensors = safetensors.torch.load(weights(whole))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    rounded = [name for name, t in tensors.items() if t.bfloat16().float().equal(t) and t.any()]
    assert not rounded
    middle = tmp_path / "whole" / "checkpoints" / "state-4.ckpt"
    resumed = train(world, tmp_path / "resumed", *common, *keep, f"resume={middle}")
    assert weights(resumed) == weights(whole)


@pytest.mark.parametrize(
    "mode, schedule", [("lossless", "fused"), ("lossless", "deferred"), ("shared", "fused")]
)
def test_a_drafter_casts_a_copy_that_shares_the_target(mode, schedule):
    """The given speculator keeps its tensors, dtypes, gradients' wish and mode."""
    target = tiny_target()
    target.model.bfloat16()
    speculator = tiny_speculator(target, mode=mode).float().train()
    before = copy.deepcopy(speculator.state_dict())
    drafter = Streaming(speculator, schedule, top_k=2).attach(target)
    assert {p.dtype for p in drafter.speculator.parameters()} == {torch.bfloat16}
    assert speculator.training and not drafter.speculator.training
    for name, parameter in speculator.named_parameters():
        assert parameter.dtype == torch.float32 and parameter.requires_grad
        assert parameter.equal(before[name])
    if mode == "shared":
        own = speculator.adapted(target).model.state_dict()
        assert {t.dtype for name, t in own.items() if ".lora_" in name} == {torch.float32}
        copied = drafter.speculator.adapted(target).model.state_dict()
        for name, tensor in own.items():
            shared = tensor.data_ptr() == copied[name].data_ptr()
            assert shared != (".lora_" in name)
