"""CUDA graphs on a device: captured once, whoever joins and leaves; pools that may be dropped."""

import gc
import time

import pytest
import torch
from tests.graphs import come_and_go
from tests.tiny import tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.streaming import Streaming
from slipstream.targets.compiled import compile_target
from slipstream.targets.loading import load_target
from slipstream.targets.packed import is_fused, unpack_linears

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TEXTS = ["name[The Mill]", "name[Aromi], food[Chinese], area[riverside]", "eatType[pub]", "food"]


def opened(device: str = "cuda"):
    return compile_target(load_target("slipstream/small-target", device=device), "auto")


def decoder_of(target, schedule: str | None):
    if schedule is None:
        return PlainDecoder(target, Sampling(), Limits(32))
    drafter = Streaming("slipstream/small-streaming", schedule, 4)
    return Engine(target, drafter, Sampling(), Limits(32), 8)


@pytest.mark.parametrize("schedule", [None, "fused", "deferred"])
def test_requests_that_join_and_leave_capture_nothing_again(schedule):
    target = opened()
    decoder = decoder_of(target, schedule)
    prompts = [target.tokenizer(text)["input_ids"] for text in TEXTS * 2]
    alone = [decoder_of(target, None).generate(ids).ids for ids in prompts]
    decoder.generate_batch(prompts[:5])
    assert come_and_go(decoder, prompts, seed=0) == alone
    graphs, address = (
        list(target.compiled.graphs.kept),
        target.compiled._buffers.layers[0][0].data_ptr(),
    )
    assert come_and_go(decoder, prompts, seed=0) == alone
    assert list(target.compiled.graphs.kept) == graphs
    assert target.compiled._buffers.layers[0][0].data_ptr() == address


def test_buffers_that_grow_drop_their_graphs_and_give_their_memory_back():
    """A pool that was opened again would end here with an internal assertion of the allocator."""
    target = opened()
    decoder = decoder_of(target, "deferred")
    prompts = [target.tokenizer(text)["input_ids"] for text in TEXTS]
    expected = [decoder_of(target, None).generate(ids).ids for ids in prompts]
    for size in (1, 2, 4):
        assert [each.ids for each in decoder.generate_batch(prompts[:size])] == expected[:size]
    before = torch.cuda.memory_reserved()
    target.compiled = None
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_answer_alike():
    found = []
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        target = opened(device)
        ids = target.tokenizer(TEXTS[0])["input_ids"]
        found.append(decoder_of(target, "deferred").generate(ids).ids)
    assert found[0] == found[1] == found[2]


def test_projections_are_fused_and_answer_as_before():
    fused, plain = opened(), load_target("slipstream/small-target", device="cuda")
    assert is_fused(fused.model)
    unpack_linears(plain.model)
    ids = fused.tokenizer(TEXTS[1])["input_ids"]
    found = [decoder_of(target, None).generate(ids).ids for target in (fused, plain)]
    assert found[0] == found[1]


def test_time_to_the_first_step_grows_no_faster_than_layers():
    seconds = {}
    for layers in (4, 8, 16):
        torch._dynamo.reset()
        target = tiny_target(num_hidden_layers=layers)
        target.model.cuda()
        decoder = PlainDecoder(compile_target(target, "reduce-overhead"), Sampling(), Limits(4))
        started = time.perf_counter()
        decoder.generate([1, 2, 3])
        torch.cuda.synchronize()
        seconds[layers] = time.perf_counter() - started
    assert seconds[16] < 4 * max(seconds[8], seconds[4])


@pytest.mark.parametrize("schedule", [None, "deferred"])
def test_padding_stages_nothing_that_is_no_number(schedule):
    target = opened()
    prompts = [target.tokenizer(text)["input_ids"] for text in TEXTS[:3]]
    decoder_of(target, schedule).generate_batch(prompts)
    assert target.compiled._buffers.batch_size == 4
    assert all(part.isfinite().all() for layer in target.compiled._buffers.layers for part in layer)
