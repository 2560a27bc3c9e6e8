"""Continuous batching without HTTP: joining, reading in parts, cancelling, counting."""

from itertools import pairwise
from random import Random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from prometheus_client import generate_latest
from tests.drafters import untrained
from tests.tiny import VOCABULARY, tiny_speculator, tiny_target, tiny_tokenizer

from slipstream.core.errors import InputError, device_lost, out_of_memory
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.decoding.request import Batch
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.streaming import Streaming
from slipstream.serving import adapting
from slipstream.serving.adapting import TRIAL, TRIED, AdaptingEngine
from slipstream.serving.counts import POSITIONS, Counts, Exposed
from slipstream.serving.jobs import Asked, Job, Told
from slipstream.serving.server import Server
from slipstream.serving.worker import Worker

LIMITS, BUDGET = Limits(16), 8


def engine(kind: str = "deferred", limits: Limits = LIMITS) -> AdaptingEngine:
    target = tiny_target()
    target.tokenizer = tiny_tokenizer()
    target.model.generation_config.eos_token_id = 7
    drafters = {
        "deferred": lambda: Streaming(tiny_speculator(target, copy_scores=True), "deferred", 3),
        "fused": lambda: Streaming(tiny_speculator(target), "fused", 3),
        "prompt lookup": lambda: PromptLookup(3, 7),
        "lookahead": untrained.lookahead,
    }
    return AdaptingEngine(target, drafters[kind](), Sampling(), limits, BUDGET)


def worker(own: AdaptingEngine | None = None, most: int = 4, rows: int = 6) -> Worker:
    return Worker(own or engine(), most, rows, Counts())


class Client:
    """One job and what it was told. words: of its prompt; leaves: after how many news it goes."""

    def __init__(self, words: list[int], leaves: int | None = None, **changes):
        prompt = " ".join(f"w{word}" for word in words)
        given = dict(sampling=Sampling(), limits=LIMITS, seed=0, streamed=True) | changes
        self.words, self.news, self.leaves = words, [], leaves
        gone = lambda: self.leaves is not None and len(self.news) >= self.leaves  # noqa: E731
        self.asked = Asked(Job(prompt, **given), self.news.append, gone)

    @property
    def text(self) -> str:
        return "".join(told.text for told in self.news)

    @property
    def end(self) -> Told:
        assert sum(told.last for told in self.news) == 1 and self.news[-1].last
        return self.news[-1]


def run(own: Worker, clients: list[Client], random: Random | None = None) -> int:
    """Let clients come, all at once or at random times; the most that were answered at once."""
    coming, most = list(clients), 0
    while coming or not own.idle:
        while coming and (random is None or random.random() < 0.4):
            asked = coming.pop(0).asked
            if own.prepare(asked):
                own.take(asked)
        own.turn()
        most = max(most, own.counts["running"])
    own.turn()
    return most


def words(count: int, random: Random) -> list[int]:
    return [random.randrange(8, VOCABULARY) for _ in range(count)]


def test_a_request_whose_logits_are_not_finite_fails_alone():
    """Others that are answered beside it, or whose prompts are being read, go on."""
    own = worker(engine("prompt lookup", Limits(10)), rows=4)
    plain = PlainDecoder(own.decoder.target, Sampling(), Limits(10))
    given = [words(count, Random(9)) for count in (3, 4, 25)]
    expected = [plain.generate(each) for each in given]
    told = [each.ids for each in expected]
    spoiled = next(t for t in told[0][2:-1] if t not in [*told[1], *told[2], *given[2]])
    own.decoder.target.model.get_input_embeddings().weight.data[spoiled] = torch.nan
    clients = [Client(each, limits=Limits(10)) for each in (*given, [*given[1], spoiled])]
    run(own, clients)
    assert [client.end.failed for client in clients] == [True, False, False, True]
    assert clients[0].text and clients[0].text in expected[0].text
    for client, each in zip(clients[1:3], expected[1:], strict=True):
        assert client.text == each.text and client.asked.request.answer.ids == each.ids
    assert own.counts["error"] == 2 and own.counts["prompt_tokens"] == sum(map(len, given))


@pytest.mark.parametrize("kind", ["deferred", "fused", "prompt lookup"])
def test_answers_are_those_alone_and_the_counts_are_the_engines(kind, monkeypatch):
    """Prompts from one token to several parts, greedy and sampled, while trees change their size:
    each answer is plain decoding's, and every counter is what its requests say."""
    monkeypatch.setattr("slipstream.serving.worker.PREFILL_ROWS", 4)  # short ones have two, too
    random = Random(2)
    ways = [Sampling(), Sampling(0.9), Sampling(0.7, top_k=9)]
    clients = [
        Client(words(count, random), sampling=ways[place % 3], seed=place)
        for place, count in enumerate((3, 25, 1, 9, 14, 2, 40, 6, 5, 33))
    ]
    own = worker(engine(kind))
    own.decoder.allowed = lambda count: [8, 1, 3, 8, 2][random.randrange(5)]
    assert run(own, clients, random) == 4
    plain = PlainDecoder(own.decoder.target, Sampling(), LIMITS)
    for client in clients:
        job = client.asked.job
        request = plain.request(client.words, job.seed, sampling=job.sampling)
        plain.start([request])
        while plain.running:
            plain.step()
        expected = request.generation()
        assert client.text == expected.text
        assert client.asked.request.answer.ids == expected.ids
        reasons = {"end": "stop", "length": "length"}
        assert client.end.finish_reason == reasons[expected.finished]
        assert client.end.completion_tokens == len(expected.ids)
        assert client.end.prompt_tokens == len(client.words)
    requests, counts = [client.asked.request for client in clients], own.counts
    drafted = sum(request.rows - len(request.accepted) for request in requests)
    accepted = [depth for request in requests for depth in request.accepted]
    assert counts["draft_tokens"] == drafted > 0
    assert counts["accepted"] == sum(accepted) > 0
    assert counts["prompt_tokens"] == sum(len(client.words) for client in clients)
    assert counts["generation_tokens"] == sum(len(each.answer.ids) for each in requests)
    for position in range(POSITIONS):
        assert counts[position] == sum(depth > position for depth in accepted)
    assert 0 < counts["drafts"] < len(accepted)  # some steps had roots alone
    assert counts["stop"] + counts["length"] == len(clients) and counts["abort"] == 0
    assert counts["running"] == 0 and own.decoder.running is None


def test_others_go_on_while_a_long_prompt_is_read():
    own, random = worker(rows=6), Random(4)
    short, long = Client(words(3, random), limits=Limits(100)), Client(words(60, random))
    for client in (short, long):
        own.prepare(client.asked)
        own.take(client.asked)
    decided, parts = [], 0
    while not long.asked.request.answer.ids:
        own.turn()
        parts += 1
        decided.append(len(short.asked.request.answer.ids))
    assert parts == 10  # 60 tokens, 6 at a time
    assert all(later > earlier for earlier, later in pairwise(decided))


def test_short_prompts_join_past_a_long_one():
    own, random = worker(rows=6), Random(5)
    long, second, short = (Client(words(count, random)) for count in (60, 50, 2))
    for client in (long, second, short):
        own.prepare(client.asked)
        own.take(client.asked)
    own.turn()
    assert short.asked.request.answer.ids and not long.asked.request.answer.ids
    assert list(own.waiting) == [second.asked]
    run(own, [])
    assert second.end.finish_reason and long.end.finish_reason


def test_clients_that_go_are_dropped_wherever_they_are():
    """Waiting, while their prompt is read, or decoding; the others are answered as alone."""
    random = Random(6)
    stays = Client(words(4, random))
    expected = engine().generate(stays.words).text
    own = worker(most=2)
    leaving = [
        Client(words(3, random), leaves=3),  # decoding
        Client(words(50, random), leaves=1),  # accepted, and gone before it is read
        Client(words(2, random), leaves=2),
        Client(words(5, random), leaves=1),
    ]
    run(own, [stays, *leaving])
    assert stays.text == expected and stays.end.finish_reason
    assert own.counts["abort"] == len(
        [each for each in leaving if each.end.finish_reason == "abort"]
    )
    assert own.counts["abort"] >= 2 and own.counts["running"] == 0
    assert own.decoder.running is None and own.reading is None and not own.waiting
    reading = Client(words(50, random))
    own.prepare(reading.asked)
    own.take(reading.asked)
    own.turn()
    own.turn()
    assert own.reading is not None
    reading.leaves = 0
    own.turn()
    assert own.reading is None and reading.end.finish_reason == "abort" and own.idle


def test_one_token_is_an_answer():
    client = Client([9, 10], limits=Limits(1))
    own = worker()
    run(own, [client])
    assert client.end.completion_tokens == 1 and client.end.finish_reason == "length"


def test_what_is_not_streamed_comes_at_the_end():
    client = Client([9, 10, 11], streamed=False)
    run(worker(), [client])
    assert [told.accepted for told in client.news] == [True, False]
    assert client.text == engine().generate([9, 10, 11]).text


@pytest.mark.parametrize(
    ("client", "sentence"),
    [
        (Client([9] * 150), "prompt: 150 tokens do not fit the target's context of 128"),
        (Client([9] * 200), "prompt: 599 bytes do not fit the target's context of 128 tokens"),
        (Client([9], limits=Limits(129)), "max_tokens: the model's context has 128 tokens"),
        (Client([]), "prompt: it has no tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(client, sentence):
    own = worker()
    run(own, [client])
    assert client.end.refused.startswith(sentence) and own.idle


def test_a_drafter_that_refuses_a_sampling_refuses_that_request_alone():
    own = worker()
    start = own.decoder.attached.start

    def refusing(requests, budget):
        if not all(request.sampling.greedy for request in requests):
            raise InputError("drafter: greedy alone")
        return start(requests, budget)

    own.decoder.attached.start = refusing
    clients = [Client([9, 10]), Client([11], sampling=Sampling(1.0)), Client([12, 9])]
    clients.append(Client([13] * 20, sampling=Sampling(1.0)))
    run(own, clients)
    assert clients[0].end.refused is None and clients[2].end.refused is None
    assert clients[1].end.refused == clients[3].end.refused == "drafter: greedy alone"


def test_an_error_in_a_step_ends_its_requests_and_not_the_server(caplog):
    own, step = worker(), None
    step, failures = own.decoder.step, [True]

    def failing():
        if failures and own.decoder.running is not None:
            raise RuntimeError(f"out of memory {failures.pop()}")
        return step()

    own.decoder.step = failing
    first, second = Client([9, 10, 11]), Client([9, 10, 11])
    run(own, [first])
    assert first.end.failed and "failed to answer" in first.end.refused
    assert own.counts["error"] == 1
    run(own, [second])
    assert second.text == engine().generate([9, 10, 11]).text
    assert "out of memory" in caplog.text


def test_requests_that_memory_has_no_room_for_wait_until_others_end():
    own = worker(engine("prompt lookup"))
    clients = [Client([9, 10, 11]), *(Client(words(3, Random(5))) for _ in range(2))]
    starting = own.decoder.starting

    def tight(requests, rows):
        if own.running:
            raise torch.OutOfMemoryError
        return starting(requests, rows)
        yield

    own.decoder.starting = lambda *given: tight(*given) if own.running else starting(*given)
    own.prepare(clients[0].asked)
    own.take(clients[0].asked)
    own.turn()
    run(own, clients[1:])
    assert not any(client.end.failed for client in clients) and own.counts["error"] == 0
    alone = engine("prompt lookup")
    assert [each.text for each in clients] == [alone.generate(c.words).text for c in clients]


def test_requests_that_fit_alone_and_not_together_come_one_by_one():
    """Also where nothing is running yet."""
    own, clients = worker(engine("prompt lookup")), [Client([9, 10, each]) for each in (11, 12, 13)]
    starting = own.decoder.starting

    def tight(requests, rows):
        if len(requests) + len(own.running) > 1:
            raise torch.OutOfMemoryError
        yield from starting(requests, rows)

    own.decoder.starting = tight
    assert run(own, clients) == 1
    alone = engine("prompt lookup")
    assert [each.text for each in clients] == [alone.generate(c.words).text for c in clients]


@pytest.mark.parametrize(
    ("sentence", "lost"),
    [
        ("CUDA error: device-side assert triggered", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", False),
        ("CUDA error: operation failed due to a previous error during capture", False),
        ("an illegal memory access", False),
    ],
)
def test_after_some_errors_of_a_device_nothing_works(sentence, lost):
    assert device_lost(RuntimeError(sentence)) == lost
    assert out_of_memory(RuntimeError(sentence)) == ("ALLOC_FAILED" in sentence)


@pytest.mark.parametrize("while_joining", [False, True])
def test_a_lost_device_ends_the_worker(while_joining):
    """Whatever started its process is to start another; what is open is told."""
    own, client = worker(), Client([9, 10, 11])
    own.prepare(client.asked)
    own.take(client.asked)
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    if while_joining:
        own.decoder.starting = lambda *_: iter(Mock(side_effect=lost), None)
    else:
        own.decoder.step = Mock(side_effect=lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        own.turn()
    assert client.end.failed


def test_the_exposition_has_the_names_of_dashboards():
    counts = Counts()
    counts.verified(nodes=7, accepted=2)
    counts.verified(nodes=7, accepted=0)
    counts["running"] = 3
    text = generate_latest(Exposed("mine", [counts, Counts()], 5)).decode()
    for line in (
        'vllm:spec_decode_num_drafts_total{model_name="mine"} 2.0',
        'vllm:spec_decode_num_draft_tokens_total{model_name="mine"} 14.0',
        'vllm:spec_decode_num_accepted_tokens_total{model_name="mine"} 2.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="mine",position="1"} 1.0',
        'vllm:num_requests_running{model_name="mine"} 3.0',
        'vllm:num_requests_waiting{model_name="mine"} 2.0',
    ):
        assert line in text


def test_measured_costs_decide_how_large_trees_are():
    own = engine("prompt lookup")
    assert own.allowed(1) == own.allowed(9) == BUDGET  # nothing is measured yet
    own.measure(5)
    assert list(own.costs) == [1, 2, 4, 5] and own.sizes == (1, 2, 3, 4, 6, 8)
    assert all(set(costs) == set(own.sizes) for costs in own.costs.values())
    assert own.running is None
    own.sizes = [1, 2, 4, 8]
    own.costs = {1: {1: 1.0, 2: 1.0, 4: 1.1, 8: 1.2}, 5: {1: 1.0, 2: 2.0, 4: 3.0, 8: 6.0}}
    assert own.allowed(1) == 8 and own.allowed(5) == own.allowed(50) == 1
    assert own.seconds(3, 8) == pytest.approx(3.6) and own.seconds(10, 8) == pytest.approx(12)
    own.gained = 2 * own.weight
    assert own.allowed(1) == 8


def test_where_no_tree_pays_one_is_tried_now_and_then():
    """By steps: that others join between two of them makes no more trials."""
    own, drafted = engine(limits=Limits(24)), []
    own.target.model.generation_config.eos_token_id = None
    own.costs = {1: dict(zip(own.sizes, range(1, 1 + len(own.sizes)), strict=True))}
    while own.steps < TRIAL + TRIED:
        own.gained = 0.0  # nothing drafted was ever right
        if own.running is None:
            own.start([own.request([9, 10, own.steps % 32])])
        own.step()
        drafted.append(own.allowed(1) > 1)
    assert drafted == [TRIAL <= step < TRIAL + TRIED for step in range(1, 1 + len(drafted))]


def test_what_was_right_of_trees_is_learned():
    own = engine("prompt lookup", Limits(40))
    own.costs = {1: dict.fromkeys(own.sizes, 1.0)}
    before = own.tokens(8)
    own.attached.target.model.generation_config.eos_token_id = None
    found = own.generate([9, 10] * 8)
    right = sum(found.accepted)
    logs = (own.weight - 200) / len(found.accepted)
    assert 0 < logs <= 3 and own.gained == pytest.approx(100 + right)
    assert (own.tokens(8) > before) == (right / (own.weight - 200) > 0.5)


def test_a_context_too_small_to_measure_leaves_the_budget():
    target = tiny_target(max_position_embeddings=24)
    own = AdaptingEngine(target, PromptLookup(3, 7), Sampling(), Limits(4), BUDGET)
    own.measure(2)
    assert own.costs == {} and own.allowed(2) == BUDGET
    assert (
        own.generate([1, 2, 3]).ids
        == PlainDecoder(target, Sampling(), Limits(4)).generate([1, 2, 3]).ids
    )


def test_costs_are_mended_by_what_steps_take(monkeypatch):
    """Trees were measured as cheap, and take nine times as long beside what else the machine does:
    they are given up for as many requests, and for no others."""
    own, now = engine(limits=Limits(24)), [0.0]
    own.target.model.generation_config.eos_token_id = None
    own.costs = {1: dict.fromkeys(own.sizes, 1.0), 2: dict.fromkeys(own.sizes, 1.0)}
    own.gained, step = own.weight, Engine._step

    def taking(engine: Engine, batch: Batch) -> None:
        now[0] += 9.0 if batch.trees.width > 1 else 1.0
        step(engine, batch)

    monkeypatch.setattr(Engine, "_step", taking)
    monkeypatch.setattr(adapting.time, "perf_counter", lambda: now[0])
    assert own.allowed(1) == own.allowed(2) == BUDGET
    widths = []
    for seed in range(12):
        own.start([own.request([9, 10, seed + 11])])
        while own.running is not None:
            widths.append(own.running.trees.width)
            own.step()
    assert widths[0] == BUDGET and widths[-1] == own.allowed(1) == 1
    assert own.allowed(2) == BUDGET
    assert own.seconds(1, 1) == 1.0 and 1.0 < own.seconds(1, 2) <= adapting.OUTLIER


def test_the_cost_of_a_size_is_that_of_steps_that_follow_one_another(monkeypatch):
    """A step of 1 node drafts nothing; one of 8 verifies 8 and drafts 8."""
    seen, own = [], engine("prompt lookup")
    step = AdaptingEngine._step
    monkeypatch.setattr(
        AdaptingEngine,
        "_step",
        lambda engine, batch: (
            seen.append((batch.trees.width, engine.allowed(len(batch.requests))))
            or step(engine, batch)
        ),
    )
    own.measure(2)
    assert {width for width, _ in seen} == set(own.sizes)
    assert all(width == following for width, following in seen)


@pytest.mark.parametrize("kind", ["deferred", "lookahead"])
def test_trees_shrink_as_others_join(kind):
    """Not only the next ones: those that were drafted for fewer requests, too."""
    own, prompts = engine(kind, Limits(24)), [[9, 10] * 6, [9, 10] * 7]
    alone = [own.generate(prompt).ids for prompt in prompts]
    own.sizes = [1, 2, 8]
    own.costs = {1: {1: 1.0, 2: 1.0, 8: 1.0}, 2: {1: 1.0, 2: 9.0, 8: 9.0}}
    requests = [own.request(prompt) for prompt in prompts]
    own.start(requests[:1])
    assert own.running.trees.width > 1
    own.start(requests[1:])
    assert own.running.trees.width == 1
    while own.running is not None:
        own.step()
    assert [request.answer.ids for request in requests] == alone


@pytest.mark.parametrize("kind", ["deferred", "fused", "prompt lookup", "lookahead"])
def test_measuring_takes_no_more_memory_than_its_steps(kind, monkeypatch):
    """However long the target's context is."""
    own, capacities = engine(kind), []
    own.target.max_positions, new_cache = 1 << 20, own.target.new_cache
    monkeypatch.setattr(
        own.target,
        "new_cache",
        lambda size, *more: capacities.append(size) or new_cache(size, *more),
    )
    own.measure(2)
    assert capacities and max(capacities) < 700 and set(own.costs) == {1, 2}


def test_a_job_tells_the_chat_template_its_arguments():
    own, told = worker(), []
    own.decoder.target.tokenizer.chat_template = (
        "{{ 'w9 ' if brief else 'w8 ' }}{{ messages[0]['content'] }}"
    )
    for arguments, ids in ((None, [8, 5]), ({"brief": True}, [9, 5]), ({"breif": True}, None)):
        job = Job([{"role": "user", "content": "w5"}], Sampling(), LIMITS, 0, False, arguments)
        asked = Asked(job, told.append, lambda: False)
        assert own.prepare(asked) == (ids is not None)
        assert told.pop().refused is None if ids else "has no 'breif'" in told.pop().refused
        assert ids is None or asked.request.tokens == ids


def test_a_limit_of_the_server_beyond_the_context_is_cut_and_a_clients_refused():
    own, told = worker(engine(limits=Limits(5000))), []
    for limits, taken in ((Limits(5000), True), (Limits(4000), False)):
        asked = Asked(Job("w1 w2", Sampling(), limits, 0, False), told.append, lambda: False)
        assert own.prepare(asked) == taken == told.pop().accepted


@pytest.mark.parametrize(
    ("given", "gpus", "found"),
    [
        (("auto", False), 0, ("cpu", [0])),
        (("auto", False), 2, ("cuda", [0, 1])),
        (("cuda", False), 3, ("cuda", [0, 1, 2])),
        (("cuda:1", False), 3, ("cuda", [1])),
        (("auto", True), 3, ("cuda", [0])),
        (("cpu", False), 3, ("cpu", [0])),
    ],
)
def test_every_device_has_a_worker(monkeypatch, given, gpus, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert Server().workers(*given) == found
    assert Server(devices=1).workers(*given)[1] == found[1][:1]
    with pytest.raises(InputError, match=r"^server.devices: 4 workers"):
        Server(devices=4).workers(*given)


def test_a_device_that_is_not_there_is_named():
    for device in ("cuda", "cpu:x"):
        with pytest.raises(InputError, match=f"^target.device: '{device}' is not available"):
            Server().workers(device)


def test_what_has_no_memory_to_start_takes_nobody_with_it(monkeypatch):
    """Whether its prompt is read at once or in parts; a failing join concerns all."""
    own, random = worker(), Random(9)
    going = Client(words(4, random), limits=Limits(60))
    expected = engine(limits=Limits(60)).generate(going.words).text
    own.prepare(going.asked)
    own.take(going.asked)
    own.turn()
    refused = [Client(words(count, random)) for count in (3, 30)]
    with monkeypatch.context() as patch:
        patch.setattr(type(own.decoder), "_fresh", lambda *_: torch.empty(2**60))
        for client in refused:
            own.prepare(client.asked)
            own.take(client.asked)
        run(own, [])  # they wait until it ends
    assert all(client.end.failed for client in refused)
    assert going.text == expected and going.end.finish_reason
    assert own.counts["error"] == 2 and own.idle
    together = [Client(words(4, random), limits=Limits(60)) for _ in range(2)]
    own.prepare(together[0].asked)
    own.take(together[0].asked)
    own.turn()
    monkeypatch.setattr(Batch, "join", lambda *_: torch.empty(2**60))
    own.prepare(together[1].asked)
    own.take(together[1].asked)
    own.turn()
    assert all(client.end.failed for client in together) and own.decoder.running is None


def test_where_memory_runs_out_graphs_give_back_theirs():
    own, graphs = worker(), Mock()
    own.decoder.target.compiled = SimpleNamespace(graphs=graphs)
    for error in (torch.OutOfMemoryError(), ValueError()):
        own.decoder.step = Mock(side_effect=error)
        own.turn()
    graphs.clear.assert_called_once_with()


def test_a_client_that_has_gone_before_its_request_is_made_ends_at_once():
    own, client = worker(), Client([9, 9], leaves=0)
    assert own.prepare(client.asked) and client.end.finish_reason == "abort"
    own.take(client.asked)
    assert own.idle and own.counts["abort"] == 1
    client = Client([9, 9], leaves=0)
    own.work(iter([client.asked, None]).__next__)
    assert client.end.finish_reason == "abort" and own.counts["abort"] == 2 and own.idle
