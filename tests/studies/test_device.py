"""A larger model with the same function: the same logits, answers and drafts; costs of contexts."""

from itertools import product

import pytest
import torch
from studies.device import context, device, without_attention
from studies.enlargement import LargeShape, enlarged_speculator, enlarged_target
from tests.exhaustive import sparing
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.row_cost import row_costs
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.targets import attention
from slipstream.targets.compiled import CompiledLayers
from slipstream.targets.loading import load_target

SHAPE = LargeShape(hidden=448, intermediate=1088, layers=10, heads=8)
PROMPT = "CREATE TABLE singer (name VARCHAR, age INTEGER)\nQuestion: How old is the singer Joe?"


@pytest.fixture(scope="module")
def pair():
    target = load_target("slipstream/small-target", packed=False)
    return target, enlarged_target(target, SHAPE, torch.float32)


def test_the_large_target_has_its_shape_and_the_same_logits(pair):
    small, large = pair
    config = large.model.config
    assert (config.hidden_size, config.intermediate_size) == (448, 1088)
    assert (large.num_layers, config.num_attention_heads, config.num_key_value_heads) == (10, 8, 8)
    ids = torch.tensor([render_prompt(small.tokenizer, PROMPT)])
    positions = torch.arange(ids.shape[1])[None]
    found, expected = (
        target.logits(target.forward(ids, positions, None, None).hidden)
        for target in (large, small)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("schedule", ["fused", "deferred"])
def test_streams_draft_the_same(pair, schedule):
    small, large = pair
    speculator = load_speculator("slipstream/small-streaming", small)
    ids = render_prompt(small.tokenizer, PROMPT)
    expected = PlainDecoder(small, Sampling(), Limits(40)).generate(ids).ids
    steps = []
    for target, own in ((small, speculator), (large, enlarged_speculator(speculator, *pair))):
        engine = Engine(target, Streaming(own, schedule, 4), Sampling(), Limits(40), 8)
        answer = engine.generate(ids)
        assert answer.ids == expected
        steps.append(answer.statistics.target_forwards)
    assert steps[0] == steps[1] < len(expected) - 1


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    sparing(
        product(["float32", "bfloat16"], [False, True]), lambda *each: each == ("bfloat16", True)
    ),
)
def test_the_study_measures_everything(pair, dtype, compiled, monkeypatch):
    """Compiled as on a GPU, but for the compiler itself (see tests/decoding/test_compiled.py)."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(pair[0], "compiled", CompiledLayers(pair[0]) if compiled else None)
    training = StreamingConfig(num_streams=2, num_msa_layers=2)
    found = device(
        pair[0], [Prompt(PROMPT, "sql", ())], "slipstream/small-streaming", training, SHAPE, dtype,
        [4], 2, [1, 2], [64], [1, 2], 1,
    )  # fmt: skip
    assert [row["method"] for row in found.rows] == ["plain", "fused, 4 nodes", "deferred, 4 nodes"]
    for row in found.rows:
        assert dtype == "bfloat16" or row["identical"] == "1/1"
        assert 0 < row["of bandwidth"] < 2
    assert [(row["rows"], row["vs one row"] == 1.0) for row in found.more["Steps"]] == [
        (1, True), (2, False)
    ]  # fmt: skip
    trained = found.more["Training"]
    assert len(trained) == 3 and all(row["peak MB"] > 0 and row["tokens/s"] > 0 for row in trained)


def test_what_cannot_be_enlarged_is_one_sentence(pair):
    with pytest.raises(InputError, match="only a Llama can be enlarged"):
        enlarged_target(tiny_target("opt"), SHAPE, torch.float32)
    shared = tiny_speculator(tiny := tiny_target(), mode="shared")
    with pytest.raises(InputError, match="only lossless streams can be enlarged"):
        enlarged_speculator(shared, tiny, pair[1])
    with pytest.raises(InputError, match="must not be smaller than the target"):
        enlarged_target(pair[0], LargeShape(256, 1088, 10, 8), torch.float32)


def test_masks_and_caches_grow_with_the_context(target):
    rows = context(target, [], [16, 64], [1, 4], repeats=2).rows
    assert [(row["committed"], row["rows"]) for row in rows] == [(16, 1), (16, 4), (64, 1), (64, 4)]
    for short, long in ((rows[0], rows[2]), (rows[1], rows[3])):
        count = short["rows"]
        for column in ("mask, KiB", "cache, MiB"):
            assert long[column] / short[column] == pytest.approx((64 + count) / (16 + count))
    assert all(row["step, ms"] > 0 and row["beyond attention, ms"] > 0 for row in rows)


def test_attention_alone_is_left_out(target, monkeypatch):
    calls, attend = [], attention.attend
    monkeypatch.setattr(attention, "attend", lambda *a, **b: calls.append(1) or attend(*a, **b))
    row_costs(target, 8, 1, (2,))
    with_attention = len(calls)
    assert with_attention == 3 * target.num_layers  # two steps to warm up
    with without_attention(target):
        row_costs(target, 8, 1, (2,))
    assert len(calls) == with_attention
    row_costs(target, 8, 1, (2,))
    assert len(calls) == 2 * with_attention
