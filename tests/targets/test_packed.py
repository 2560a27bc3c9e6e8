"""Packed and fused linears against the plain ones they replace."""

import copy

import pytest
import torch
from tests.tiny import tiny_speculator, tiny_target
from torch import nn
from transformers.pytorch_utils import Conv1D

from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.streaming import Streaming
from slipstream.speculators.checkpoint import load_speculator
from slipstream.targets.loading import load_target
from slipstream.targets.lora import LoraSettings, with_lora
from slipstream.targets.packed import (
    FusedLinear,
    PackedLinear,
    RoundedLinear,
    _share_of_time,
    fuse_linears,
    is_fused,
    is_packed,
    pack_linears,
    packing_available,
    reordering_pays,
    rounding_available,
    unpack_linears,
)
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
    pack_linears(holder)
    assert isinstance(holder["inner"], PackedLinear)
    return holder["inner"]


CASES = [("linear", True), ("linear", False), ("conv1d", True)]


needs_rounding = pytest.mark.skipif(
    not rounding_available(), reason="this processor multiplies no 8-bit numbers"
)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_a_rows_rounding_does_not_depend_on_other_rows():
    module, rows = (
        RoundedLinear(torch.randn(32, 48), torch.randn(32)),
        torch.randn(5, 48).bfloat16(),
    )
    alone = [module(row[None]) for row in rows]
    rows[0, 3] = 300.0  # an outlier, as some tokens have
    assert torch.equal(module(rows)[1:], torch.cat(alone[1:]))


@needs_rounding
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "bias"), CASES)
def test_rounded_weights_are_off_by_rounding_alone(kind, bias, dtype):
    module = linear(kind, bias, dtype)
    holder = nn.ModuleDict({"inner": copy.deepcopy(module)})
    pack_linears(holder, rounded=True)
    assert isinstance(holder["inner"], RoundedLinear)
    for shape in ((1,), (7,), (33,), (2, 3, 5)):
        rows = torch.randn(*shape, 48, dtype=dtype)
        found, expected = holder["inner"](rows), module(rows)
        assert found.dtype == dtype and found.shape == expected.shape
        assert (found - expected).norm() < 0.02 * expected.norm()
    zeros = torch.zeros(3, 48, dtype=dtype)
    torch.testing.assert_close(holder["inner"](zeros), module(zeros))


@needs_rounding
def test_streams_of_a_bfloat16_target_draft_in_8_bits():
    """Their drafts are nearly those of the hooks; answers are plain decoding's all the same."""
    target = load_target("slipstream/small-target", dtype="bfloat16")
    speculator = load_speculator("slipstream/small-streaming", target)
    layers = speculator.merged_layers(target)
    kinds = {type(module) for module in layers.modules() if hasattr(module, "in_features")}
    assert kinds - {FusedLinear} == {RoundedLinear}
    prompt, found = render_prompt(target.tokenizer, "name[The Olive Tree], area[riverside]"), {}
    for name, merge in (("rounded", speculator.merged_layers), ("hooks", lambda _: None)):
        speculator.merged_layers = merge
        drafter = Streaming(speculator, "deferred", 4)
        found[name] = Engine(target, drafter, Sampling(), Limits(48), 8).generate(prompt)
    plain = PlainDecoder(target, Sampling(), Limits(48)).generate(prompt)
    assert found["rounded"].ids == found["hooks"].ids == plain.ids
    taus = [generation.statistics.tau for generation in found.values()]
    assert taus[0] == pytest.approx(taus[1], rel=0.2) and taus[0] > 1.3


@pytest.mark.parametrize(("kind", "bias"), CASES)
def test_float32_agrees_for_any_number_of_rows(kind, bias):
    module = linear(kind, bias, torch.float32)
    fast = packed(module)
    for count in range(70):
        rows = torch.randn(count, 48)
        torch.testing.assert_close(fast(rows), module(rows), rtol=0, atol=1e-5)
    rows = torch.randn(2, 3, 7, 48)
    torch.testing.assert_close(fast(rows), module(rows), rtol=0, atol=1e-5)
    strided = torch.randn(48, 7).t()
    torch.testing.assert_close(fast(strided), module(strided), rtol=0, atol=1e-5)


def test_prompts_of_any_length_need_few_kernels(monkeypatch):
    fast, asked = packed(linear("linear", True, torch.float32)), set()
    own = torch.ops.mkldnn._linear_pointwise

    def counted(rows, *rest):
        asked.add(rows.shape[:-1].numel())
        return own(rows, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    seen = []
    fast.register_forward_hook(lambda _, given, found: seen.append((len(given[0]), len(found))))
    for count in range(1, 513):
        assert fast(torch.randn(count, 48)).shape == (count, 72)
    assert seen == [(count, count) for count in range(1, 513)]
    assert asked == {*range(1, 32), *(n << up for up in range(1, 5) for n in range(16, 33))}


@pytest.mark.parametrize(("kind", "bias"), CASES)
def test_bfloat16_agrees_as_far_as_its_digits_go(kind, bias):
    module = linear(kind, bias, torch.bfloat16)
    holder = nn.Sequential(copy.deepcopy(module))
    pack_linears(holder)
    assert isinstance(holder[0], PackedLinear) == packing_available(torch.bfloat16)
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
    pack_linears(holder)
    assert all(now is then for now, then in zip(holder, before, strict=True))


@pytest.mark.parametrize(("architecture", "per_layer"), [("llama", 7), ("opt", 6), ("gpt2", 4)])
def test_a_packed_model_gives_the_same_greedy_tokens(architecture, per_layer):
    model = tiny_target(architecture).model.float()
    plain = Target(model)
    fast = Target(copy.deepcopy(model))
    extra = 3 if architecture == "opt" else 1
    pack_linears(fast.model)
    packed_ones = [child for child in fast.model.modules() if isinstance(child, PackedLinear)]
    assert len(packed_ones) == 4 * per_layer + extra
    lookup = Engine(fast, PromptLookup(2, 4), Sampling(), Limits(24), budget=5)
    for prompt in ([3], [1, 2, 3, 1, 2], list(range(20))):
        expected = PlainDecoder(plain, Sampling(), Limits(24)).generate(prompt).ids
        assert PlainDecoder(fast, Sampling(), Limits(24)).generate(prompt).ids == expected
        assert lookup.generate(prompt).ids == expected


FUSED = {"llama": 2, "mistral": 2, "qwen2": 2, "qwen3": 2, "gemma": 2, "opt": 1, "gpt_neo": 1,
         "gpt2": 0, "phi3": 0, "gpt_neox": 0, "olmo3": 2, "gemma3_text": 2}  # fmt: skip


def states(target: Target) -> torch.Tensor:
    ids = torch.arange(12).view(2, 6)
    positions = torch.arange(6).expand(2, -1)
    return target.logits(target.forward(ids, positions, None, None).hidden)


@pytest.mark.parametrize(("ordinary", "reordered"), [(0.9, 1.0), (1.0, 1.0), (1.0, 0.9)])
def test_weights_keep_their_order_where_products_are_faster_so(ordinary, reordered, monkeypatch):
    if not packing_available(torch.float32):
        pytest.skip("this build of torch cannot reorder weights")
    measured = []

    def seconds(linears, inputs):
        rows = {each.shape[0] for each in inputs.values()}
        measured.append((type(linears[0]), len(linears), *rows))
        return ordinary if type(linears[0]) is nn.Linear else reordered

    monkeypatch.setattr("slipstream.targets.packed.MARGIN", 0.95)
    monkeypatch.setattr("slipstream.targets.packed._seconds", seconds)
    _share_of_time.cache_clear()
    try:
        model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
        assert reordering_pays(model) == (ordinary >= reordered)
        assert set(measured) == {
            (kind, 2, rows) for kind in (nn.Linear, PackedLinear) for rows in (1, 8)
        }
        count = len(measured)
        assert reordering_pays(copy.deepcopy(model)) == (ordinary >= reordered)
        assert len(measured) == count  # once for all models of these shapes
        monkeypatch.setattr("slipstream.targets.packed.MEASURED_NUMBERS", 6 * 4)
        reordering_pays(model)
        assert measured[-1][1] == 1  # and of a large one no more than fits
    finally:
        _share_of_time.cache_clear()


def test_a_target_is_reordered_where_that_pays(monkeypatch):
    monkeypatch.setattr("slipstream.targets.packed.MARGIN", torch.inf)
    assert not is_packed(load_target("slipstream/small-target", device="cpu").model)
    monkeypatch.setattr("slipstream.targets.packed.MARGIN", 0.0)
    found = load_target("slipstream/small-target", device="cpu").model
    assert is_packed(found) == packing_available(torch.float32)


@pytest.mark.parametrize("architecture", FUSED)
def test_fused_linears_compute_what_each_does(architecture):
    plain, fast = tiny_target(architecture), tiny_target(architecture)
    fuse_linears(fast.family.layers, fast.family.fused)
    fused = [child for child in fast.model.modules() if isinstance(child, FusedLinear)]
    count = len({id(child.product) for child in fused})
    assert count == FUSED[architecture] * 4 and is_fused(fast.model) == (count > 0)
    torch.testing.assert_close(states(fast), states(plain), rtol=0, atol=1e-10)
    twin = copy.deepcopy(fast.model)
    assert twin.get_memory_footprint() == plain.model.get_memory_footprint()
    weights = dict(plain.model.named_parameters())
    unpack_linears(twin)
    assert not is_fused(twin)
    for name, weight in twin.named_parameters():
        assert torch.equal(weight, weights[name])
    assert len(list(twin.named_parameters())) == len(weights)


def test_a_product_is_made_once_and_kept_no_longer_than_needed(monkeypatch):
    target, made = tiny_target(), []
    linear = torch.nn.functional.linear
    expected = states(target)
    fuse_linears(target.family.layers, target.family.fused)

    def counted(rows, weight, bias=None):
        made.append(len(weight))
        return linear(rows, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    found = states(target)
    assert len(made) == 4 * 4 + 1  # qkv, output, gate and up, down; and the head
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    attention = target.family.layers[0].self_attn
    product = attention.q_proj.product
    assert product.later == []
    attention.q_proj(torch.randn(1, 1, 24).double())  # what was interrupted here
    torch.testing.assert_close(states(target), expected, rtol=0, atol=1e-10)
    assert product.later == []


@pytest.mark.parametrize("schedule", ["fused", "deferred"])
def test_streams_draft_the_same_beside_fused_linears(schedule):
    answers = []
    for fused in (False, True):
        target = tiny_target()
        if fused:
            fuse_linears(target.family.layers, target.family.fused)
        drafter = Streaming(tiny_speculator(target, seed=2), schedule, 2).attach(target)
        assert drafter.merged is None or is_fused(drafter.merged) == fused
        found = Engine(drafter.target, drafter, Sampling(), Limits(24), 6).generate([3, 1, 4])
        answers.append((found.ids, found.accepted))
    assert answers[0] == answers[1]


def test_lora_and_trained_weights_are_never_fused():
    target = tiny_target()
    fuse_linears(target.family.layers, target.family.fused)
    adapted, _ = with_lora(target, LoraSettings(rank=2))
    assert not is_fused(adapted.model) and is_fused(target.model)
    torch.testing.assert_close(states(adapted), states(target), rtol=0, atol=1e-10)
    trained = tiny_target()
    trained.model.requires_grad_(True)
    for each in (adapted, trained):
        fuse_linears(each.family.layers, each.family.fused)
        assert not is_fused(each.model)
