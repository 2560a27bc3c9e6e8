"""The closed forms of overheads.py against modules of the paper's sizes, made on the meta device,
and FLOPs as PyTorch counts them there; Eq. 10."""

import json
from collections.abc import Callable
from functools import cache

import pytest
import torch
from studies.overheads import (
    DRAFT_MODELS,
    LLAMA_68M,
    OPT_125M,
    SHAPES,
    Cost,
    Shape,
    costs,
    overheads,
)
from studies.two_models import speed_over_two_models, two_models
from tests.tiny import tiny_target
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from slipstream.core.errors import InputError
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.streaming import Streaming
from slipstream.results.record import environment
from slipstream.results.writer import write
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.lora import LoraSettings
from slipstream.targets.rows import Rows
from slipstream.targets.target import Target

GAMMA, ATTENDED, NODES, DRAFTED = 4, 64, 32, 121
EVERY_TARGET = pytest.mark.parametrize("name", sorted(SHAPES))
LLAMA_7B = "Llama-2-7B, Vicuna-7B"


def by_method(name: str, **options) -> dict[str, Cost]:
    return {cost.method: cost for cost in costs(name, **options)}


@cache
def meta_target(shape: Shape) -> Target:
    """An OPT, or a Llama, of these sizes without storage; heads of 64."""
    sizes = dict(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 64,
        vocab_size=shape.vocabulary,
    )
    with torch.device("meta"):
        if shape.mlp_matrices == 2:
            sizes |= dict(ffn_dim=shape.intermediate, word_embed_proj_dim=shape.hidden)
            return Target(OPTForCausalLM(OPTConfig(**sizes)).eval())
        sizes |= dict(
            intermediate_size=shape.intermediate, num_key_value_heads=shape.key_width // 64
        )
        return Target(LlamaForCausalLM(LlamaConfig(**sizes)).eval())


def lossless(name: str) -> StreamingSpeculator:
    mlp = "adapter" if SHAPES[name].mlp_module else "base+adapter"
    with torch.device("meta"):
        return StreamingSpeculator(meta_target(SHAPES[name]), StreamingConfig(mlp=mlp))


def matrices(*modules: nn.Module) -> int:
    """Weights of all matrices."""
    found = [parameter for module in modules for parameter in module.parameters()]
    return sum(parameter.numel() for parameter in found if parameter.ndim > 1)


def counted(run: Callable[[], object], attention: bool = True) -> int:
    """FLOPs of `run`; those of attention, the only products of batches of matrices, if asked."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    counts = dict(counter.get_flop_counts()["Global"])
    products = counts.pop(torch.ops.aten.bmm, 0)
    return sum(counts.values()) + (products if attention else 0)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def forward(target: Target, count: int) -> torch.Tensor:
    """Logits of `count` rows that attend to `ATTENDED` tokens, themselves among them."""
    cache = target.new_cache(ATTENDED)
    cache.lengths = [ATTENDED - count]
    ids, mask = empty(1, count, dtype=torch.long), empty(1, 1, count, ATTENDED, dtype=torch.bool)
    return target.logits(target.forward(ids, ids, mask, cache).hidden)


@pytest.mark.parametrize("shape", [*SHAPES.values(), LLAMA_68M, OPT_125M])
def test_shapes_are_those_of_real_models(shape):
    target = meta_target(shape)
    assert len(target.family.layers) == shape.layers
    assert matrices(target.family.layers[0]) == shape.layer
    assert target.model.lm_head.weight.numel() == shape.head
    assert (target.family.mlp is not None) == shape.mlp_module
    assert counted(lambda: forward(target, 5)) == 2 * 5 * shape.row(ATTENDED)


@EVERY_TARGET
def test_parameters_of_streams(name):
    speculator, found = lossless(name), by_method(name)
    total = sum(parameter.numel() for parameter in speculator.parameters())
    assert found["streaming, fused"].parameters == total
    assert found["streaming, deferred"].parameters == total
    assert found["streaming, shared"].parameters == speculator.num_extra_parameters()


@EVERY_TARGET
def test_flops_of_deferred_streams(name):
    target, speculator = meta_target(SHAPES[name]), lossless(name)
    cache = target.new_cache(ATTENDED)
    cache.lengths = [ATTENDED - GAMMA]
    token = empty(1, 1, dtype=torch.long)
    sees_all = empty(1, 1, 1, cache.length, dtype=torch.bool)

    def draft() -> None:
        main = empty(1, 1, target.hidden_size)
        streams = speculator.run_streams(target, main, token, token, sees_all, cache)
        target.logits(streams)

    assert counted(draft) == by_method(name)["streaming, deferred"].flops


@EVERY_TARGET
@pytest.mark.parametrize("method", ["streaming, fused", "streaming, shared"])
def test_flops_of_fused_streams(name, method):
    """What streams add to a verifying forward of 32 nodes, attention aside: sdpa computes it with
    all slots, whatever the mask says. A merged target of shared mode has the shapes of the base."""
    target, speculator = meta_target(SHAPES[name]), lossless(name)
    if method == "streaming, shared":
        speculator.adapters = None

    def verify(carried: int) -> None:
        positions = torch.arange(NODES, device="meta")[None]
        mask = empty(1, 1, NODES, NODES, dtype=torch.bool)
        rows = Rows(empty(1, NODES, target.hidden_size), positions, mask)
        if carried:
            rows = speculator.add_streams(rows, positions)
        with speculator.acting_on(target, rows):
            target.run_layers(speculator.msa_layers(target), rows, None)
        target.logits(empty(carried, target.hidden_size))

    added = counted(lambda: verify(GAMMA), attention=False)
    added -= counted(lambda: verify(0), attention=False)
    assert added == by_method(name, attended=0)[method].flops


@EVERY_TARGET
def test_flops_of_the_pruning_head(name):
    target, speculator = meta_target(SHAPES[name]), lossless(name)
    tree = empty(DRAFTED, target.hidden_size)
    found = counted(lambda: speculator.early_exit_logits(target, tree))
    for cost in costs(name):
        assert cost.pruning_flops == (found if cost.method.startswith("streaming") else None)


@EVERY_TARGET
def test_medusa_heads(name):
    shape = SHAPES[name]
    with torch.device("meta"):
        blocks = [nn.Linear(shape.hidden, shape.hidden) for _ in range(GAMMA)]
        heads = [nn.Linear(shape.hidden, shape.vocabulary, bias=False) for _ in range(GAMMA)]

    def draft() -> None:
        state = empty(1, shape.hidden)
        for block, head in zip(blocks, heads, strict=True):
            head(state + nn.functional.silu(block(state)))

    assert by_method(name)["Medusa"].parameters == matrices(*blocks, *heads)
    assert by_method(name)["Medusa"].flops == counted(draft)


@EVERY_TARGET
def test_eagle(name):
    """One row at a time through the join, a layer of the target's shape and the target's head."""
    target = meta_target(SHAPES[name])
    width, layer = target.hidden_size, target.family.layers[0]
    with torch.device("meta"):
        join = nn.Linear(2 * width, width, bias=False)

    def draft() -> None:
        for _ in range(GAMMA):
            cache = target.new_cache(ATTENDED)
            cache.lengths = [ATTENDED - 1]
            position = empty(1, 1, dtype=torch.long)
            rows = Rows(join(empty(1, 1, 2 * width)), position, None)
            target.head(target.run_modules([layer], rows, cache).hidden)

    assert by_method(name)["EAGLE"].parameters == matrices(join, layer)
    assert by_method(name)["EAGLE"].flops == counted(draft)


@pytest.mark.parametrize(
    ("draft", "parameters"), [(LLAMA_68M, 68_030_208), (OPT_125M, 125_239_296)]
)
def test_draft_models(draft: Shape, parameters):
    """The published models' numbers of parameters; biases and norms are under 0.1 %."""
    target = meta_target(draft)
    assert sum(parameter.numel() for parameter in target.model.parameters()) == parameters
    assert draft.parameters == matrices(target.model) == pytest.approx(parameters, rel=1e-3)

    def drafting() -> None:
        for _ in range(GAMMA):
            forward(target, 1)

    pairs = [name for name, small in DRAFT_MODELS.items() if small is draft]
    assert {by_method(name)["two models"].parameters for name in pairs} == {draft.parameters}
    assert {by_method(name)["two models"].flops for name in pairs} == {counted(drafting)}


def test_pairs_are_the_papers():
    assert set(DRAFT_MODELS) == set(SHAPES) - {"Phi-3-mini", "Mistral-7B"}
    for name, draft in DRAFT_MODELS.items():
        assert draft.vocabulary == SHAPES[name].vocabulary
    assert by_method("Mistral-7B")["two models"] == Cost("two models", None, None)


@pytest.mark.parametrize(
    ("name", "streams", "medusa", "eagle"),
    [("Phi-3-mini", 61_440, "4.3E+08", "1.3E+08"), (LLAMA_7B, 81_920, "5.9E+08", "2.4E+08")],
)
def test_parameters_of_table_3(name, streams, medusa, eagle):
    """For EAGLE on Mistral, whose MLP is wider, the paper prints Llama's number."""
    found = by_method(name)
    assert found["streaming, shared"].parameters == streams
    assert f"{found['Medusa'].parameters:.1E}" == medusa
    assert f"{found['EAGLE'].parameters:.1E}" == eagle


def test_numbers_of_the_notes():
    assert by_method("OPT-1.3B")["streaming, shared"].parameters == 40_960
    assert by_method(LLAMA_7B)["Medusa"].parameters == 4 * (4096**2 + 4096 * 32000)
    fused = by_method(LLAMA_7B, nodes=32, drafted=32)["streaming, fused"]
    assert fused.flops / 1e9 == pytest.approx(70.6, abs=0.1)
    assert fused.pruning_flops / 1e9 == pytest.approx(8.4, abs=0.1)
    with torch.device("meta"):
        shared = StreamingSpeculator(
            meta_target(Shape(4096, 4, 1024, 1000, 4096)),
            StreamingConfig(mode="shared", adapter_rank=0, lora=LoraSettings()),
        )
    assert shared.num_extra_parameters() == 81_920


def test_eq_10_on_the_papers_example():
    """Appendix N: with gamma 4, C_target / C_draft = 10 and C_ss = C_target, parity is at
    zeta = 1.4 beta."""
    assert speed_over_two_models(4, 1, 10, 10, zeta=1.4, beta=1) == pytest.approx(1)
    # by hand: (3 * 2 + 12) / 3 = 6 ms a token against 10 / 2.5 = 4 ms
    assert speed_over_two_models(3, 2, 12, 10, zeta=3, beta=2.5) == pytest.approx(1.5)


def test_a_budget_below_the_draft_models_chain_is_refused():
    draft = DraftModel(meta_target(LLAMA_68M), 4)
    streaming = Streaming("anywhere", "deferred", top_k=2)
    with pytest.raises(InputError, match=r"study\.budget: 4 nodes.* give at least 5"):
        two_models(tiny_target(), [], draft, streaming, budget=4, repeats=1)


def test_the_study_is_written_as_record_table_and_picture(tmp_path):
    target = tiny_target()
    result = overheads(target, [], 4, 4, 64, 32, 121)
    write(tmp_path, result, {"a": 1}, environment(target))
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["results"] == result.rows and content["config"] == {"a": 1}
    assert content["environment"]["versions"]["torch"] == torch.__version__
    assert content["environment"]["dtype"] == "float64"
    assert "| Vicuna-33B | Medusa | 1,029,177,344 |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "plot.png").stat().st_size > 10_000
