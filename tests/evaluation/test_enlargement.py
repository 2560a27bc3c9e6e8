"""A larger model with the same function: the same logits, answers and drafts."""

import pytest
import torch
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.enlargement import LargeShape, enlarged_speculator, enlarged_target
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.device import DeviceStudy
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.streaming.config import StreamingConfig
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


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_study_measures_everything(pair, dtype, compiled, monkeypatch):
    """Compiled as on a GPU, but for the compiler itself (see tests/decoding/test_compiled.py)."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(pair[0], "compiled", CompiledLayers(pair[0]) if compiled else None)
    training = StreamingConfig(num_streams=2, num_msa_layers=2)
    study = DeviceStudy(
        "slipstream/small-streaming", training, SHAPE, dtype, [4], 2, [1, 2], [64], [1, 2], 1
    )
    rows = study.run(pair[0], [Prompt(PROMPT, "sql", ())]).rows
    assert [row["what"] for row in rows] == ["decoding"] * 3 + ["step"] * 2 + ["training"] * 3
    for row in rows[:3]:
        assert dtype == "bfloat16" or row["identical"] == "1/1"
        assert 0 < row["of bandwidth"] < 2
    assert rows[3]["vs one row"] == 1.0
    assert all(row["peak GiB"] > 0 and row["tokens/s"] > 0 for row in rows[5:])


def test_what_cannot_be_enlarged_is_one_sentence(pair):
    with pytest.raises(InputError, match="only a Llama can be enlarged"):
        enlarged_target(tiny_target("opt"), SHAPE, torch.float32)
    shared = tiny_speculator(tiny := tiny_target(), mode="shared")
    with pytest.raises(InputError, match="only lossless streams can be enlarged"):
        enlarged_speculator(shared, tiny, pair[1])
    with pytest.raises(InputError, match="must not be smaller than the target"):
        enlarged_target(pair[0], LargeShape(256, 1088, 10, 8), torch.float32)
