"""What a step costs after ever more committed tokens."""

import pytest
from studies.context import context, without_attention

from slipstream.evaluation.row_cost import row_costs
from slipstream.targets import attention


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
    assert with_attention == 12 * target.num_layers  # two runs, the first to warm up
    with without_attention(target):
        row_costs(target, 8, 1, (2,))
    assert len(calls) == with_attention
    row_costs(target, 8, 1, (2,))
    assert len(calls) == 2 * with_attention
