"""The closed forms of costs.py against modules made on the meta device."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.evaluation.costs import SHAPES, Shape, costs
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.lora import LoraSettings
from slipstream.targets.target import Target


def by_method(name: str) -> dict[str, int]:
    return {cost.method: cost.parameters for cost in costs(name)}


def meta_target(shape: Shape) -> Target:
    """A Llama of these sizes without storage."""
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=shape.hidden,
                intermediate_size=shape.intermediate,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.hidden // 64,
                num_key_value_heads=shape.key_width // 64,
                vocab_size=shape.vocabulary,
            )
        )
    return Target(model)


@pytest.mark.parametrize("name", sorted(name for name in SHAPES if "OPT" not in name))
def test_shapes_and_streams_are_those_of_real_modules(name):
    shape = SHAPES[name]
    target = meta_target(shape)
    weights = [p.numel() for p in target.family.layers[0].parameters() if p.ndim > 1]
    assert sum(weights) == shape.layer
    assert target.model.lm_head.weight.numel() == shape.head
    with torch.device("meta"):
        lossless = StreamingSpeculator(target, StreamingConfig(mlp="adapter"))
    assert by_method(name)["streaming, fused"] == sum(p.numel() for p in lossless.parameters())
    assert by_method(name)["streaming, shared"] == lossless.num_extra_parameters()


def test_numbers_of_the_notes():
    assert by_method("Llama-2-7B, Vicuna-7B")["streaming, shared"] == 81_920
    assert by_method("Phi-3-mini")["streaming, shared"] == 61_440
    assert by_method("OPT-1.3B")["streaming, shared"] == 40_960
    assert by_method("Llama-2-7B, Vicuna-7B")["Medusa"] == 4 * (4096**2 + 4096 * 32000)
    with torch.device("meta"):
        shared = StreamingSpeculator(
            meta_target(Shape(4096, 4, 1024, 1000, 4096)),
            StreamingConfig(mode="shared", adapter_rank=0, lora=LoraSettings()),
        )
    assert shared.num_extra_parameters() == 81_920
