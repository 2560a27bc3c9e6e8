"""Compiled steps: the tokens of the eager ones, whatever is compiled, padded or replayed."""

import copy
import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from random import Random
from threading import Barrier
from unittest.mock import Mock

import pytest
import torch
from tests.exhaustive import sparing
from tests.graphs import Cuda, come_and_go, stand_in
from tests.tiny import VOCABULARY, tiny_speculator, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.core import cache
from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine, verified_rows
from slipstream.decoding.plain import PlainDecoder, _run
from slipstream.decoding.sprinter import SprinterDecoder
from slipstream.drafters import base
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.streaming import Streaming
from slipstream.serving import adapting
from slipstream.serving.adapting import AdaptingEngine
from slipstream.speculators.classifiers import SprinterConfig, SprinterVerifier
from slipstream.targets import compiled, graphs
from slipstream.targets.compiled import CompiledLayers, compile_target
from slipstream.targets.loading import load_target
from slipstream.targets.packed import fuse_linears
from slipstream.targets.reading import joined, read_on

LIMITS = Limits(max_new_tokens=16)
ROOM = 8 + 4  # what the stand-in has in place of GRANULARITY and PROMPT
BATCH = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]]


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    yield stand_in(monkeypatch)
    graphs._stream.cache_clear()


@pytest.fixture
def replayed(cuda, monkeypatch):
    """Makes the steps of a target captured and replayed, and those of its draft models."""
    monkeypatch.setattr(compiled, "REPLAYING", ("cpu", "cuda"))
    return lambda target: compile_target(target, "reduce-overhead")


def streams(target, schedule: str, **options) -> Streaming:
    settings = dict(transition_rank=2, copy_scores=True) | options
    return Streaming(tiny_speculator(target, seed=2, **settings), schedule, top_k=2)


def sprinter(target) -> SprinterDecoder:
    draft = tiny_target(seed=8, hidden_size=16)
    torch.manual_seed(0)
    verifier = SprinterVerifier(draft, SprinterConfig(("hidden",), (1.0,)))
    return SprinterDecoder(target, draft, verifier, Sampling(1.0), LIMITS, 1.0, 0.5, 4)


DECODERS = {
    "plain": lambda target: PlainDecoder(target, Sampling(), LIMITS),
    "sampled": lambda target: PlainDecoder(target, Sampling(1.0), LIMITS),
    "fused": lambda target: Engine(target, streams(target, "fused"), Sampling(), LIMITS, 6),
    "deferred": lambda target: Engine(target, streams(target, "deferred"), Sampling(), LIMITS, 6),
    "sampled streams": lambda target: Engine(
        target, streams(target, "deferred"), Sampling(0.9), LIMITS, 6
    ),
    "rotated": lambda target: Engine(
        target, streams(target, "deferred", value_rotation=0.01), Sampling(), LIMITS, 6
    ),
    "limited": lambda target: Engine(
        target, streams(target, "fused", attended_tokens=3), Sampling(), LIMITS, 6
    ),
    "limited, deferred": lambda target: Engine(
        target, streams(target, "deferred", attended_tokens=3), Sampling(), LIMITS, 6
    ),
    "draft model": lambda target: Engine(
        target, DraftModel(tiny_target(seed=0), 3), Sampling(), LIMITS, 6
    ),
    "sprinter": sprinter,
    "prompt lookup": lambda target: Engine(target, PromptLookup(2, 3), Sampling(), LIMITS, 6),
    "sampled lookup": lambda target: Engine(target, PromptLookup(2, 3), Sampling(0.9), LIMITS, 6),
    "pruned": lambda target: Engine(
        target,
        Streaming(tiny_speculator(target, seed=2), "fused", 2, prune_threshold=0.05, prune_cap=3),
        Sampling(),
        LIMITS,
        6,
    ),
}


# What changes the streams alone, or the sampling, is among the full products. Batches are not
# pruned: fused streams that may be are fused ones there.
ONCE_REPLAYED = "plain", "deferred", "draft model", "sprinter", "prompt lookup", "pruned"
ONCE_FREE = "plain", "deferred", "draft model", "sprinter", "pruned"


@pytest.mark.parametrize(
    ("name", "architecture"),
    sparing(
        product(DECODERS, ("llama", "mistral")),
        lambda name, architecture: name in ONCE_REPLAYED and architecture == "mistral",
    ),
)
def test_replayed_steps_give_the_tokens_of_eager_ones(cuda, replayed, name, architecture):
    changes = {"sliding_window": 6} if architecture == "mistral" else {}
    eager = DECODERS[name](tiny_target(architecture, **changes))
    ours = DECODERS[name](replayed(tiny_target(architecture, **changes)))
    expected = [eager.generate(ids, 1).ids for ids in BATCH]
    together = [each.ids for each in eager.generate_batch(BATCH, [1, 2, 3])]
    for _ in range(2):  # the second time over the buffers and graphs of the first
        assert [ours.generate(ids, 1).ids for ids in BATCH] == expected
        alone = cuda.captures
        assert [each.ids for each in ours.generate_batch(BATCH, [1, 2, 3])] == together
    assert 0 < alone <= cuda.captures


def test_shared_mode_is_compiled_as_the_target_that_it_changes(replayed):
    found = []
    for prepare in (lambda target: target, replayed):
        target = prepare(tiny_target())
        drafter = Streaming(tiny_speculator(target, seed=2, mode="shared"), "fused", 2)
        engine = Engine(target, drafter, Sampling(), LIMITS, 6)
        assert (engine.target.compiled is None) == (target.compiled is None)
        found.append([engine.generate(ids).ids for ids in BATCH])
    assert found[0] == found[1]


def test_a_drafted_step_waits_once(monkeypatch):
    """All that the host reads in a greedy step comes in one transfer."""
    waits, send = [], base.sent
    monkeypatch.setattr(base, "sent", lambda *given: waits.append(1) or send(*given))
    for schedule in ("fused", "deferred"):
        target, waits[:] = tiny_target(), []
        engine = Engine(target, streams(target, schedule), Sampling(), LIMITS, 6)
        steps = engine.generate(BATCH[0]).statistics.target_forwards
        assert len(waits) == steps + 1  # the prefill's


@pytest.mark.exhaustive
def test_compiled_layers_compute_what_the_eager_ones_do():
    """The real compiler, on one small span."""
    eager, ours = tiny_target(), compile_target(tiny_target(), "reduce-overhead")
    decoders = [PlainDecoder(target, Sampling(), Limits(4)) for target in (eager, ours)]
    assert decoders[0].generate(BATCH[0]).ids == decoders[1].generate(BATCH[0]).ids


def test_automatic_compilation_is_for_accelerators():
    assert compile_target(tiny_target(), "auto").compiled is None
    assert compile_target(tiny_target(), "off").compiled is None


def test_a_drafter_is_attached_once_to_a_target(cuda, replayed):
    """A second engine runs over the graphs of the first."""
    target = replayed(tiny_target())
    drafter = streams(target, "deferred")
    made = []
    for _ in range(2):
        engine = Engine(target, drafter.attached(target), Sampling(), LIMITS, 6)
        engine.generate(BATCH[0])
        made.append(cuda.captures)
    assert made[0] == made[1]


def test_what_cannot_be_compiled_says_so():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(InputError, match="rotary positions that depend on the length"):
        compile_target(tiny_target(rope_parameters=rope), "reduce-overhead")
    with pytest.raises(InputError, match="mode: must be one of auto, off, reduce-"):
        compile_target(tiny_target(), "max")
    packed = load_target("slipstream/small-draft")
    with pytest.raises(InputError, match=r"set target\.packed=false, or engine\.compile=off"):
        compile_target(packed, "reduce-overhead")
    assert compile_target(packed, "auto").compiled is None


PADDED = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8}


@pytest.fixture
def shapes(monkeypatch) -> set[tuple]:
    """The distinct steps: which layers or parts between them, of how many (padded) sequences, rows
    and slots, over which buffers."""
    found, run, replay = set(), CompiledLayers.__call__, CompiledLayers.replayed

    def kept(layers, cache):  # not those of requests that are yet to join
        return not layers.graphs.capturing and cache.layers is layers._buffers.layers

    def seen(layers, modules, rows, cache):
        if rows.repeats and kept(layers, cache):
            sizes = rows.hidden.shape[1], rows.num_nodes, rows.mask.shape[-1]
            batch, address = PADDED[len(rows.hidden)], cache.layers[0][0].data_ptr()
            found.add((id(modules[0]), len(modules), batch, sizes, address))
        return run(layers, modules, rows, cache)

    def part(layers, whole, key, inputs, cache):
        function, settings = key
        if kept(layers, cache or layers._buffers):
            sizes = tuple(given.shape[1:] for given in inputs)
            address = layers._buffers.layers[0][0].data_ptr()
            told = tuple(each for each in settings if not isinstance(each, tuple))  # not samplings
            found.add((id(layers), (function, told), PADDED[len(inputs[0])], sizes, address))
        return replay(layers, whole, key, inputs, cache)

    monkeypatch.setattr(CompiledLayers, "__call__", seen)
    monkeypatch.setattr(CompiledLayers, "replayed", part)
    return found


MIXED = ["plain", "sampled", "fused", "deferred", "draft model", "sprinter"]
MIXED += ["sampled streams", "prompt lookup", "pruned"]
ONCE = ["deferred", "prompt lookup"]


@pytest.mark.parametrize(("name",), sparing([(name,) for name in MIXED], lambda name: name in ONCE))
def test_captures_are_as_many_as_the_distinct_shapes(cuda, replayed, shapes, name):
    """Whatever lengths, joins and leaves there are: nothing else moves what graphs know."""
    random = Random(5)
    prompts = [[random.randrange(VOCABULARY) for _ in range(n)] for n in (5, 1, 9, 3, 2, 14, 4, 7)]
    eager, ours = tiny_target(), replayed(tiny_target())
    for target in (eager, ours):
        target.model.generation_config.eos_token_id = [7, 9]
    expected, ours = DECODERS[name](eager), DECODERS[name](ours)
    alone = [expected.generate(ids, seed).ids for seed, ids in enumerate(prompts)]
    assert len(set(map(len, alone))) > 2
    largest = [prompts[5]] * 5
    ours.generate_batch(largest)  # from here on no buffer grows
    addresses = {address for *_, address in shapes}
    for seed in range(2):
        if name != "sprinter":  # whose answers depend on the numbers that were drawn before
            assert come_and_go(ours, prompts, seed) == alone
        else:
            come_and_go(ours, prompts, seed)
        assert [ours.generate(ids, seed).ids for seed, ids in enumerate(prompts)] == alone
    assert {address for *_, address in shapes} == addresses
    assert cuda.captures == len(shapes) > 4
    assert {batch for _, _, batch, *_ in shapes} == {1, 2, 4, 8}


@pytest.mark.parametrize("name", ["deferred", "prompt lookup", "draft model"])
def test_requests_of_several_temperatures_are_replayed_together(replayed, name):
    """Three, so that graphs for four serve them: no padding is taken for a request."""
    samplings = [Sampling(0.5), Sampling(1.0), Sampling()]
    eager, ours = DECODERS[name](tiny_target()), DECODERS[name](replayed(tiny_target()))
    found = []
    for decoder in (eager, ours):
        given = zip(BATCH, samplings, strict=True)
        requests = [decoder.request(ids, 3, sampling=sampling) for ids, sampling in given]
        decoder.start(requests)
        while decoder.running:
            decoder.step()
        found.append([request.answer.ids for request in requests])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["plain", "deferred"])
def test_a_sampling_that_a_client_asks_for_captures_no_forward_of_its_own(replayed, name):
    """A server's clients may ask for any temperature: layers are captured for the usual sampling,
    for greedy requests, and once for all others."""
    decoder = DECODERS[name](replayed(tiny_target()))

    def forwards(samplings) -> int:
        for sampling in samplings:
            decoder.start([decoder.request([3, 1, 4], 1, sampling=sampling, limits=Limits(4))])
            while decoder.running:
                decoder.step()
        small = ("grown", "drafted", "logits")
        names = [getattr(key[0](), "__name__", "") for key in decoder.target.compiled.graphs.kept]
        return sum(name not in small for name in names)

    first = forwards([Sampling(), Sampling(0.7)])
    assert forwards([Sampling(0.8), Sampling(0.9, top_p=0.5), Sampling(top_p=0.5)]) == first > 1


def test_leaving_requests_capture_nothing_again(cuda, replayed, monkeypatch):
    """Eight, then seven, six and five are all served by the graphs for eight."""
    monkeypatch.setattr(compiled, "GRANULARITY", 64)
    ours = DECODERS["deferred"](replayed(tiny_target()))
    ours.target.model.generation_config.eos_token_id = None
    requests = [ours.request([3 + n, 1, 4], limits=Limits(24)) for n in range(8)]
    ours.start(requests)
    ours.step(), ours.step()
    before = cuda.captures
    for request in requests[:3]:
        ours.finish(request)
        ours.step()
    assert cuda.captures == before > 0


def test_a_pool_lives_as_long_as_its_graphs(cuda, replayed):
    """One for all graphs over the same buffers; another where these grow, since none is opened
    again whose graphs are gone."""
    target = replayed(tiny_target())
    decoder = PlainDecoder(target, Sampling(), LIMITS)
    decoder.generate(BATCH[0])
    (first,) = cuda.pools
    assert len(cuda.pools[first]) == cuda.captures > 1
    decoder.generate_batch(BATCH[:2])  # two sequences need other buffers
    second = list(cuda.pools)[1]
    assert not cuda.pools[first] and cuda.pools[second] and cuda.living == 1
    decoder.generate(BATCH[0])
    assert list(cuda.pools) == [first, second]
    target.compiled = None
    del decoder, target
    gc.collect()
    assert not cuda.living


def test_graphs_that_were_not_used_for_longest_go_first(cuda, replayed, monkeypatch):
    target = replayed(tiny_target())
    decoder = PlainDecoder(target, Sampling(), Limits(100))
    target.model.generation_config.eos_token_id = None
    answer = decoder.generate(BATCH[0]).ids
    needed = len(target.compiled.graphs.kept)
    assert needed == cuda.captures > 2
    monkeypatch.setattr(graphs, "MOST", needed - 1)
    target.compiled.graphs.kept.popitem()
    assert decoder.generate(BATCH[0]).ids == answer
    assert len(target.compiled.graphs.kept) == needed - 1 < cuda.captures - 1


def test_two_devices_have_two_pools_and_two_streams(cuda, replayed):
    for device in (torch.device("cuda", 0), torch.device("cuda", 1)):
        for seed in (0, 1):  # of one device two models
            target = replayed(tiny_target(seed=seed))
            target.compiled.graphs.device = device
            PlainDecoder(target, Sampling(), Limits(4)).generate(BATCH[0])
    devices = {device for device, _, _ in cuda.places}
    assert len(devices) == len({stream for _, stream, _ in cuda.places}) == 2
    assert all(stream.device == device for device, stream, _ in cuda.places)
    pools = {(device, pool) for device, _, pool in cuda.places}
    assert len(pools) == len({pool for _, pool in pools}) == 4


def test_buffers_grow_and_never_shrink(cuda, replayed, monkeypatch):
    target, sizes = replayed(tiny_target()), []
    for capacity, batch in ((16, 1), (60, 1), (20, 3), (20, 1), (90, 5), (10, 8)):
        cache = target.new_cache(capacity, batch)
        sizes.append((cache.capacity, cache.batch_size))
        assert cache.room >= capacity and len(cache.lengths) == batch
        del cache
    assert sizes == [(32, 1), (96, 1), (96, 4), (96, 4), (128, 8), (128, 8)]
    size = target.compiled._buffers.nbytes
    monkeypatch.setattr(compiled, "has_room_for", lambda wanted, *_: wanted <= size)
    cache = target.new_cache(500, 1)  # alone, where there is no room for eight
    assert (cache.capacity, cache.batch_size) == (512, 1)


def test_a_cache_holds_what_it_was_made_for(cuda, replayed):
    target = replayed(tiny_target())
    kept = target.new_cache(1)  # so that the others have buffers of their own, as large as asked
    for count in (1, 5, 8, 17):
        cache = target.new_cache(count)
        read_on(target, [[3] * count], cache)
        assert cache.lengths == [count] and cache.capacity == count + ROOM
    assert kept.lengths == [0]


@pytest.mark.parametrize(("name",), sparing(zip(DECODERS), lambda name: name in ONCE_FREE))
def test_buffers_are_free_when_an_answer_is_finished(cuda, replayed, name):
    """At once, and not when circles are collected: else the next answer would find no graphs."""
    target = replayed(tiny_target())
    decoder = DECODERS[name](target)
    gc.disable()
    try:
        decoder.generate_batch(BATCH[:2])
        assert target.compiled._user() is None
        made = cuda.captures
        decoder.generate_batch(BATCH[:2])
        assert cuda.captures == made
    finally:
        gc.enable()


def test_decoders_of_one_target_may_be_at_work_together(cuda, replayed):
    target = replayed(tiny_target())
    one, other = DECODERS["plain"](target), DECODERS["deferred"](target)
    expected = [one.generate(ids).ids for ids in BATCH]
    requests = [decoder.request(BATCH[0]) for decoder in (one, other)]
    for decoder, request in zip((one, other), requests, strict=True):
        decoder.start([request])
        decoder.step()
    while one.running or other.running:
        one.step(), other.step()
    assert [request.answer.ids for request in requests] == [expected[0]] * 2


@pytest.mark.parametrize("name", ["plain", "deferred", "draft model"])
def test_a_prompt_read_while_others_end_decodes_with_graphs(replayed, name):
    """Its cache was its own while theirs held the buffers."""
    eager, ours = DECODERS[name](tiny_target()), DECODERS[name](replayed(tiny_target()))
    request = ours.request(BATCH[2])
    ours.start([ours.request([3, 1, 4], limits=Limits(2))])
    parts = ours.starting([request], 4)
    next(parts)
    while ours.running:
        ours.step()
    for _ in parts:
        pass
    assert ours.running.cache.layers is ours.target.compiled._buffers.layers
    while ours.running:
        ours.step()
    assert request.answer.ids == eager.generate(BATCH[2]).ids


def test_what_a_server_has_measured_it_captures_no_more(cuda, replayed, monkeypatch):
    """Steps of the sizes and depths that it takes, over buffers that grew once."""
    monkeypatch.setattr(compiled, "GRANULARITY", 256)
    monkeypatch.setattr(compiled, "CAPACITY", 512)
    monkeypatch.setattr(adapting, "PROMPT", 8)
    target = replayed(tiny_target(max_position_embeddings=512))
    engine = AdaptingEngine(target, streams(target, "deferred"), Sampling(), LIMITS, 4)
    engine.measure(2)

    def verifications() -> int:
        return sum(key[0]() is verified_rows for key in target.compiled.graphs.kept)

    known = verifications()
    engine.costs = {1: dict.fromkeys(engine.sizes, 1.0)}  # trees pay
    engine.generate_batch(BATCH[:1])
    engine.generate_batch(BATCH[:2])
    assert verifications() == known > 3


def test_threads_that_begin_together_have_buffers_of_their_own(cuda, replayed, monkeypatch):
    """Also where one is stopped between asking for buffers and taking them."""
    upload = cache.on_device
    target = compile_target(tiny_target(), "reduce-overhead")
    decoders = [PlainDecoder(target, Sampling(), LIMITS) for _ in range(4)]
    prompts = [[3, 1, seed] for seed in range(4)]
    expected = [decoders[0].generate(prompt).ids for prompt in prompts]

    def slow(values, device):  # a copy into pinned memory lets other threads go on
        time.sleep(1e-4)
        return upload(values, device)

    monkeypatch.setattr(cache, "on_device", slow)
    together = Barrier(4)

    def answer(decoder, prompt):
        together.wait()
        return decoder.generate(prompt).ids

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            assert list(pool.map(answer, decoders, prompts)) == expected


@pytest.mark.parametrize(("name",), sparing(zip(["fused", "pruned"]), lambda name: name == "fused"))
def test_prompts_of_any_length_join_with_streams(replayed, name):
    """A prompt is padded, and its last row has streams: both have room in a cache that is as large
    as asked for."""
    decoder = DECODERS[name](replayed(tiny_target(max_position_embeddings=256)))
    decoder.start([decoder.request([3, 1, 4], limits=Limits(48))])
    for length in range(1, 12):
        request = decoder.request(list(range(length)), limits=Limits(1))
        decoder.start([request])
        assert request.finished


@pytest.mark.parametrize(
    ("name",),
    sparing(
        zip(["deferred", "fused", "limited", "pruned"]), lambda name: name in ("deferred", "pruned")
    ),
)
def test_graphs_go_with_the_drafter_they_are_of(replayed, name):
    """So that layers with merged adapters, which they hold, do not stay."""
    target = replayed(tiny_target())
    left = []
    for _ in range(3):
        engine = DECODERS[name](target)
        engine.generate(BATCH[0])
        gone = weakref.ref(engine.attached), weakref.ref(engine.attached.speculator)
        del engine
        gc.collect()
        assert [each() for each in gone] == [None, None]
        left.append(len(target.compiled.graphs.kept))
    assert len(set(left)) == 1


def test_a_copy_of_a_compiled_target_is_not_compiled(replayed):
    target = replayed(tiny_target())
    assert copy.deepcopy(target).compiled is None and target.compiled is not None


def test_results_of_one_kind_share_their_memory(replayed):
    """Logits of all numbers of slots, and not as many as there are graphs."""
    target = replayed(tiny_target())
    target.model.generation_config.eos_token_id = None
    Engine(target, PromptLookup(2, 3), Sampling(), Limits(60), 6).generate(BATCH[0])
    ours = target.compiled.graphs
    logits = [kind for kind in ours._results if kind[0][-1] == VOCABULARY]
    assert len(ours.kept) > 5 > len(logits) > 0


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(), RuntimeError("CUDA error: out of memory\nCUDA kernel")]
)
def test_where_memory_is_short_graphs_go_and_the_step_runs(cuda, replayed, monkeypatch, error):
    eager = PlainDecoder(tiny_target(), Sampling(), LIMITS)
    ours = PlainDecoder(replayed(tiny_target()), Sampling(), LIMITS)
    expected = [eager.generate(ids).ids for ids in BATCH]
    capture, made, failing = torch.cuda.graph, [], []

    def short(*given, **options):
        made.append(1)
        if failing or len(made) == 3:
            raise error
        return capture(*given, **options)

    monkeypatch.setattr(torch.cuda, "graph", short)
    assert [ours.generate(ids).ids for ids in BATCH] == expected
    kept = ours.target.compiled.graphs
    assert len(made) > 3 and 0 < len(kept.kept) < len(made)
    made.clear(), failing.append(True), kept.clear()
    assert [ours.generate(ids).ids for ids in BATCH] == expected
    tried = len(made)
    assert [ours.generate(ids).ids for ids in BATCH] == expected
    assert len(made) == tried == len(kept._short)  # once each, not in every step


def test_a_capture_that_fails_leaves_the_thread_where_it_was(cuda, replayed):
    graphs, calls = replayed(tiny_target()).compiled.graphs, []

    def run(given: torch.Tensor) -> torch.Tensor:
        calls.append(given)
        if len(calls) == 3:  # after the two that warm up
            raise ValueError
        return given + 1

    before = cuda.current_stream()
    cuda.set_stream(before)
    with pytest.raises(ValueError):
        graphs.of(("run",), run, [torch.zeros(1)])
    assert cuda.current_stream() is before and not graphs.capturing


def test_where_memory_is_short_for_larger_buffers_the_others_stay(cuda, replayed, monkeypatch):
    target = replayed(tiny_target())
    first, second = target.new_cache(20, 2), target.new_cache(20, 2)
    buffers = target.compiled._buffers
    with monkeypatch.context() as short:
        short.setattr(target, "allocate", Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            joined(target, first, second)
    assert target.compiled._buffers is buffers and target.compiled._captures(first)


class Products(TorchDispatchMode):
    """Counts operations, and matrix products among them, that no graph holds."""

    def __init__(self):
        super().__init__()
        self.all = self.products = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.all += 1
        self.products += str(function).split(".")[1] in ("mm", "addmm", "bmm", "linear", "matmul")
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("name", ["plain", "prompt lookup"])
def test_norm_and_head_are_in_the_graph(cuda, replayed, name):
    decoder = DECODERS[name](replayed(tiny_target()))
    decoder.generate(BATCH[0])
    decoder.start([decoder.request(BATCH[0])])
    with Products() as outside:
        decoder.step()
    assert outside.products == 0 and outside.all > 0


def test_prompts_of_like_lengths_share_a_graph(cuda, replayed):
    eager, ours = (PlainDecoder(target, Sampling(), LIMITS)
                   for target in (tiny_target(), replayed(tiny_target())))  # fmt: skip
    captures = []
    for length in (30, 3, 4, 1, 13, 16, 17, 18):  # the first makes room; 17 rows are no graph's
        prompt = [n % VOCABULARY for n in range(length)]
        assert ours.generate(prompt).ids == eager.generate(prompt).ids
        captures.append(sum(key[0]() is not _run for key in list(ours.target.compiled.graphs.kept)))
    assert captures == [0, 1, 1, 1, 2, 2, 2, 2]


def test_one_layer_is_compiled_for_all(monkeypatch):
    """What the compiler sees does not grow with the number of layers, nor with lengths."""
    graphs, found = [], {}

    def counting(graph, _):
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **ways: compile_(function, backend=counting, **ways)
    )
    for layers in (4, 8, 16):
        torch._dynamo.reset()
        graphs.clear()
        ours = compile_target(tiny_target(num_hidden_layers=layers), "reduce-overhead")
        fuse_linears(ours.family.layers, ours.family.fused)
        eager = tiny_target(num_hidden_layers=layers)
        for length in (3, 40, 100):
            prompt = [n % VOCABULARY for n in range(length)]
            expected = PlainDecoder(eager, Sampling(), Limits(4)).generate(prompt).ids
            assert PlainDecoder(ours, Sampling(), Limits(4)).generate(prompt).ids == expected
            drafted = Engine(ours, PromptLookup(3, 7), Sampling(), Limits(4), 8)
            assert drafted.generate(prompt).ids == expected
        found[layers] = list(graphs)
    assert len(found[4]) == 2 and found[4] == found[8] == found[16]  # one row, and several


@pytest.mark.exhaustive
def test_time_to_compile_does_not_grow_with_the_layers(monkeypatch):
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    seconds = []
    for layers in (4, 4, 16):  # the first also warms the compiler up
        torch._dynamo.reset()
        ours = compile_target(tiny_target(num_hidden_layers=layers), "reduce-overhead")
        started = time.perf_counter()
        PlainDecoder(ours, Sampling(), Limits(3)).generate(BATCH[0])
        seconds.append(time.perf_counter() - started)
    assert seconds[2] < 3 * seconds[1]


def test_joining_copies_those_alone_that_join(cuda, replayed):
    """Where there is room; else all, into buffers that are larger by what is needed alone."""
    target = replayed(tiny_target())
    first = target.new_cache(20, 2)
    second = target.new_cache(20, 1)
    grown = joined(target, first, second)
    assert grown is not first and (grown.capacity, grown.batch_size) == (first.capacity, 4)
    del first
    assert joined(target, grown, target.new_cache(20, 1)) is grown and len(grown.lengths) == 4


class Changing(Engine):
    """Trees that are roots alone every other time, as a busy server has them."""

    steps = 0

    def allowed(self, count: int) -> int:
        self.steps += 1
        return 6 if self.steps % 2 else 1

    def widths(self, width: int) -> int:
        return width


@pytest.mark.parametrize("schedule", ["fused", "deferred"])
def test_what_pads_a_batch_is_a_text_as_well(replayed, schedule):
    """Of three texts a graph has four. What the fourth refers to must exist, also where trees are
    roots alone: a device would stop for good."""
    plain = PlainDecoder(tiny_target(), Sampling(), LIMITS)
    expected = [plain.generate(ids).ids for ids in BATCH]
    target = replayed(tiny_target())
    decoder = Changing(target, streams(target, schedule), Sampling(), LIMITS, 6)
    assert [each.ids for each in decoder.generate_batch(BATCH)] == expected


@pytest.mark.parametrize("count", [1, 2])
def test_one_request_runs_ahead_of_what_the_host_knows(replayed, monkeypatch, count):
    """The next forward begins before the host waits for what the last one decided; not of several
    requests, of which one often ends, and not where there is no room for more."""
    monkeypatch.setattr(compiled, "GRANULARITY", 64)
    events, forward, host = [], Engine._forward, base.Verified.host
    target = replayed(tiny_target())
    decoder = Engine(target, streams(target, "deferred"), Sampling(), LIMITS, 6)

    def forwards(*given):
        events.append("forward")
        return forward(*given)

    def learns(verified):
        events.extend([] if verified.known else ["host"])
        return host(verified)

    monkeypatch.setattr(Engine, "_forward", forwards)
    monkeypatch.setattr(base.Verified, "host", learns)
    found = decoder.generate_batch(BATCH[:count])
    steps = max(each.statistics.target_forwards for each in found)
    assert events.count("host") == steps + 1  # the prefill's
    if count == 1:
        assert events == ["forward", "host"] * steps + ["host"]
    else:
        assert events == ["host", *["forward", "host"] * steps]


@pytest.mark.parametrize("name", ["plain", "deferred"])
def test_what_is_no_number_does_not_stay_in_the_buffers(replayed, name):
    """One prompt overflows; the next one finds the same memory."""
    eager, ours = DECODERS[name](tiny_target()), DECODERS[name](replayed(tiny_target()))
    with torch.no_grad():
        for each in (eager, ours):
            each.target.model.get_input_embeddings().weight[7] = torch.inf
    try:
        ours.generate([7, 1])
        raise AssertionError("the answer should be no number")
    except InputError:
        pass
    gc.collect()
    assert ours.generate([3, 1, 4]).ids == eager.generate([3, 1, 4]).ids


def test_requests_that_came_during_a_long_prompt_get_graphs_again(cuda, replayed, monkeypatch):
    """The prompt that is read in parts holds the buffers of graphs, so the others have their own
    until the next one joins."""
    eager, ours = DECODERS["deferred"](tiny_target()), DECODERS["deferred"](replayed(tiny_target()))
    prompts = [[n % VOCABULARY for n in range(40)], [3, 1, 4], [9, 2], [6, 5, 3]]
    requests = [ours.request(prompt) for prompt in prompts]

    def shared() -> bool:
        return ours.running.cache.layers is ours.target.compiled._buffers.layers

    reading = ours.starting(requests[:1], 8)
    next(reading)
    ours.start(requests[1:2])
    assert not shared()
    list(reading)
    assert shared()
    ours.step()
    ours.start(requests[2:3])
    assert shared()
    reading = ours.starting(requests[3:], 1)
    next(reading), ours.step(), list(reading)
    assert shared()
    while ours.running:
        ours.step()
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.answer.ids == eager.generate(prompt).ids


def test_padding_of_trees_is_no_work_that_was_asked_for(replayed):
    """A draft model of three tokens in a budget of six: as many rows as eagerly."""
    found = []
    for prepare in (lambda target: target, replayed):
        decoder = DECODERS["draft model"](prepare(tiny_target()))
        took = [decoder.generate(ids, 1).statistics for ids in BATCH]
        took += [each.statistics for each in decoder.generate_batch(BATCH, [1, 2, 3])]
        found.append([(each.target_rows, each.target_forwards) for each in took])
    assert found[0] == found[1] and found[0][0][0] <= 4 * found[0][0][1]
