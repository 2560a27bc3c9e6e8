"""What needs a CUDA device: exactness as on the CPU, and rows that cost next to nothing."""

import pytest
import torch
from tests.commands import config_of

from slipstream import app
from slipstream.core.sampling import Sampling
from slipstream.core.transfer import sent
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.row_cost import row_costs
from slipstream.targets.compiled import compile_target
from slipstream.targets.loading import load_target

PROMPTS = ["name[The Mill], eatType[pub]", "name[Aromi], food[Chinese], area[riverside]"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_every_method_gives_the_output_of_generate(tmp_path):
    small = "num_prompts=2", "repeats=1", "limits.max_new_tokens=24"
    records = app.infer(config_of("infer", "experiment=demo", *small, f"output_dir={tmp_path}"))
    for record in records:
        assert record["identical"] == record["num_prompts"], record["method"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafts", [None, ("fused", 4), ("deferred", 4), ("deferred", 4, 0.02, 8)])
def test_replayed_steps_give_the_tokens_of_eager_ones_and_wait_once(
    drafts, temperature, monkeypatch
):
    """Inside a step nothing waits for the device but the one transfer of what the host needs."""
    kind, found, sampling = Engine if drafts else PlainDecoder, [], Sampling(temperature)
    step = kind._step

    def strict(*arguments):
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def waiting(*tensors):
        arrived = sent(*tensors)

        def wait():
            before = torch.cuda.get_sync_debug_mode()  # a prefill may wait elsewhere, too
            torch.cuda.set_sync_debug_mode("default")
            try:
                return arrived()
            finally:
                torch.cuda.set_sync_debug_mode(before)

        return wait

    for mode in ("off", "auto"):
        target = compile_target(load_target("slipstream/small-target", device="cuda"), mode)
        assert (target.compiled is None) == (mode == "off")
        decoder = PlainDecoder(target, sampling, Limits(48))
        if drafts:
            drafter = Streaming("slipstream/small-streaming", *drafts)
            decoder = Engine(target, drafter, sampling, Limits(48), 12)
        prompts = [target.tokenizer(text)["input_ids"] for text in PROMPTS]
        found.append([decoder.generate(ids, 7).ids for ids in prompts])
        with monkeypatch.context() as patched:
            patched.setattr(kind, "_step", strict)
            patched.setattr("slipstream.drafters.base.sent", waiting)
            patched.setattr("slipstream.decoding.plain.sent", waiting)
            assert [decoder.generate(ids, 7).ids for ids in prompts] == found[0]
    assert found[0] == found[1]


def test_sprinter_is_compared_with_exact_ways(tmp_path):
    rows = app.infer(
        config_of("infer", "experiment=sprinter_small", "num_prompts=8", f"output_dir={tmp_path}")
    )
    overall = {row["method"]: row for row in rows if row["task"] == "all"}
    assert overall["plain"]["tokens/call"] == 1.0
    assert overall["sprinter_1.5_0.4"]["tokens/call"] > 2.0
    assert (
        0 < overall["sprinter_1.5_0.5"]["distance"] < overall["sprinter_1.5_0.4"]["distance"] < 0.5
    )


def test_eight_rows_cost_little_more_than_one():
    costs = row_costs(load_target("slipstream/small-target", device="cuda"))
    assert costs[8] < 1.5 * costs[1]
