"""Packed linears against the plain ones they replace."""

import copy

import pytest
import torch
from tests.tiny import tiny_target
from torch import nn
from transformers.pytorch_utils import Conv1D

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.targets.packed import PackedLinear, pack_linears, packing_available
from slipstream.targets.target import Target


def linear(kind: str, bias: bool, dtype: torch.dtype) -> nn.Module:
    """A 48 -> 72 layer with random weights and bias."""
    torch.manual_seed(0)
    module = nn.Linear(48, 72, bias=bias) if kind == "linear" else Conv1D(72, 48)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.15)
    return module.to(dtype).requires_grad_(False)


def packed(module: nn.Module) -> nn.Module:
    """A packed copy, made the way a whole model is packed."""
    holder = nn.ModuleDict({"inner": copy.deepcopy(module)})
    assert pack_linears(holder) == 1
    assert isinstance(holder["inner"], PackedLinear)
    return holder["inner"]


CASES = [("linear", True), ("linear", False), ("conv1d", True)]


@pytest.mark.parametrize(("kind", "bias"), CASES)
def test_float32_agrees_for_any_number_of_rows(kind, bias):
    module = linear(kind, bias, torch.float32)
    fast = packed(module)
    for count in range(34):
        rows = torch.randn(count, 48)
        torch.testing.assert_close(fast(rows), module(rows), rtol=0, atol=1e-5)
    rows = torch.randn(2, 3, 5, 48)
    torch.testing.assert_close(fast(rows), module(rows), rtol=0, atol=1e-5)
    strided = torch.randn(48, 7).t()
    torch.testing.assert_close(fast(strided), module(strided), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "bias"), CASES)
def test_bfloat16_agrees_as_far_as_its_digits_go(kind, bias):
    module = linear(kind, bias, torch.bfloat16)
    holder = nn.Sequential(copy.deepcopy(module))
    assert pack_linears(holder) == int(packing_available(torch.bfloat16))
    for count in range(1, 34):
        rows = torch.randn(count, 48, dtype=torch.bfloat16)
        found = holder(rows)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, module(rows), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("kind", "bias"), CASES)
def test_the_weight_comes_back_bit_for_bit(kind, bias):
    module = linear(kind, bias, torch.float32)
    fast = packed(module)
    matrix = module.weight.t() if kind == "conv1d" else module.weight
    assert torch.equal(fast.weight, matrix)
    assert (fast.in_features, fast.out_features) == (48, 72)
    assert (fast.bias is None) == (module.bias is None)


def test_a_deep_copy_computes_the_same_and_stands_alone():
    fast = packed(linear("linear", True, torch.float32))
    twin = copy.deepcopy(nn.Sequential(fast))[0]
    rows = torch.randn(4, 48)
    expected = fast(rows)
    assert torch.equal(twin(rows), expected) and torch.equal(twin.weight, fast.weight)
    twin.bias.add_(1.0)
    assert torch.equal(fast(rows), expected)


def test_what_cannot_be_packed_is_left_alone():
    class Special(nn.Linear):
        """Stands for another library's linear."""

    double = nn.Linear(8, 8).double()
    holder = nn.Sequential(double, Special(8, 8), nn.LayerNorm(8), nn.Embedding(8, 8))
    before = list(holder)
    assert pack_linears(holder) == 0
    assert all(now is then for now, then in zip(holder, before, strict=True))


@pytest.mark.parametrize(("architecture", "per_layer"), [("llama", 7), ("opt", 6), ("gpt2", 4)])
def test_a_packed_model_gives_the_same_greedy_tokens(architecture, per_layer):
    model = tiny_target(architecture).model.float()
    plain = Target(model)
    fast = Target(copy.deepcopy(model))
    extra = 3 if architecture == "opt" else 1
    assert pack_linears(fast.model) == 4 * per_layer + extra
    lookup = Engine(fast, PromptLookup(2, 4), Sampling(), Limits(24), budget=5)
    for prompt in ([3], [1, 2, 3, 1, 2], list(range(20))):
        expected = PlainDecoder(plain, Sampling(), Limits(24)).generate(prompt).ids
        assert PlainDecoder(fast, Sampling(), Limits(24)).generate(prompt).ids == expected
        assert lookup.generate(prompt).ids == expected
