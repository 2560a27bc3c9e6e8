"""Studies of batches, sampling, contexts and quantised targets, on tiny models."""

import pytest
from tests.tiny import save_tiny_target, tiny_speculator

from slipstream.core.errors import InputError
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.row_cost import row_costs
from slipstream.evaluation.studies import quantization
from slipstream.evaluation.studies.batches import BatchStudy
from slipstream.evaluation.studies.context import ContextStudy, without_attention
from slipstream.evaluation.studies.quantization import QuantizationStudy
from slipstream.evaluation.studies.top_k_sampling import TopKSamplingStudy
from slipstream.speculators.checkpoint import save_speculator
from slipstream.targets import attention
from slipstream.targets.loading import load_target

PROMPTS = [Prompt("w3 w5 w8 w13", "a"), Prompt("w1 w2", "b"), Prompt("w9 w4 w7", "a")]


def test_batches_of_all_sizes_give_the_same_answers(target):
    drafter = Streaming(tiny_speculator(target), "auto", 2)
    rows = BatchStudy(drafter, [1, 3], [1, 4], repeats=1).run(target, PROMPTS).rows
    assert [(row["batch"], row["nodes"]) for row in rows] == [(1, 1), (1, 4), (3, 1), (3, 4)]
    assert all(row["identical"] == "3/3" and row["tokens/s"] > 0 for row in rows)
    assert {row["tau"] for row in rows if row["nodes"] == 1} == {1.0}
    with pytest.raises(InputError, match="3 do not fill a batch of 4"):
        BatchStudy(drafter, [4], [2], repeats=1).run(target, PROMPTS)


def test_top_k_sampling_is_measured_for_every_k(target):
    drafter = Streaming(tiny_speculator(target), "auto", 2)
    study = TopKSamplingStudy(drafter, 6, [1, 5], temperature=1.0, repeats=1)
    rows = study.run(target, PROMPTS).rows
    assert [row["top-k"] for row in rows] == [1, 5]
    assert all(row["tau"] >= 1 and row["speed vs plain"] > 0 for row in rows)


def test_masks_and_caches_grow_with_the_context(target):
    rows = ContextStudy([16, 64], [1, 4], repeats=2).run(target, PROMPTS).rows
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


def test_every_quantisation_is_compared_with_its_own_plain_decoding(tmp_path, monkeypatch):
    """Training is replaced by a random speculator of the target that the overrides name."""
    folder = str(save_tiny_target(tmp_path / "target", hidden_size=64, intermediate_size=128))

    def train(script, overrides, place, made):
        kind = overrides[-1].removeprefix("target.quantization=")
        own = load_target(folder, quantization=None if kind == "null" else kind)
        save_speculator(place / made, tiny_speculator(own).float(), own, 64, "")
        return place / made

    monkeypatch.setattr(quantization, "run_step", train)
    study = QuantizationStudy([None, "nf4"], ["x=1"], str(tmp_path / "runs"), 2, 4, repeats=1)
    rows = study.run(load_target(folder), PROMPTS).rows
    assert [row["weights"] for row in rows] == ["none"] * 3 + ["nf4"] * 3
    assert rows[0]["MiB"] > rows[3]["MiB"]
    for row in rows:
        found, expected = row["identical"].split("/")
        assert found == expected and row["tau"] >= 1
