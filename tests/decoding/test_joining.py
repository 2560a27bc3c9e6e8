"""Requests join and leave at random steps; their answers are those alone, in float64."""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from random import Random

import pytest
from tests.drafters import untrained
from tests.exhaustive import sparing
from tests.tiny import VOCABULARY, tiny_speculator, tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.decoding.sprinter import SprinterDecoder
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.streaming import Streaming
from slipstream.speculators.classifiers import SprinterConfig, SprinterVerifier

LIMITS = Limits(12)
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(0.8)}


def decoders(sampling: Sampling) -> dict[str, Callable[[], Decoder]]:
    """By name what makes a decoder."""
    target = tiny_target()
    target.model.generation_config.eos_token_id = 7
    speculator = tiny_speculator(target, transition_rank=3, copy_scores=True)
    draft = tiny_target("llama", seed=5, num_hidden_layers=1)
    drafters = untrained.untrained([[1, 2, 3, 4], [4, 3, 2, 1]]) | {
        "fused": Streaming(speculator, "fused", 3),
        "deferred": Streaming(speculator, "deferred", 3),
        "deferred, gammatune": Streaming(speculator, "deferred", 3, length=untrained.gammatune()),
        "deferred, drawn": Streaming(speculator, "deferred", 3, drawn=True),
        "draft model": DraftModel(draft, 4),
        "draft model, gammatune": DraftModel(draft, 4, untrained.gammatune()),
    }
    found = {"plain": partial(PlainDecoder, target, sampling, LIMITS)}
    for name, drafter in drafters.items():
        found[name] = partial(Engine, target, drafter, sampling, LIMITS, 9)
    if not sampling.greedy:
        verifier = SprinterVerifier(draft, SprinterConfig(("hidden",), (1.0,))).eval()
        settings = sampling, LIMITS, 1.0, 0.5, 4
        found["sprinter"] = partial(SprinterDecoder, target, draft, verifier, *settings)
    return found


SAMPLED = "plain", "deferred", "deferred, drawn", "draft model", "sprinter", "unispec"
NAMES = [(name, kind) for kind, own in SAMPLINGS.items() for name in decoders(own)]
# Of n-gram drafters the others are proven in test_stores.py, with what is accepted.
OTHERS = [*untrained.untrained([[1, 2]]), "deferred, drawn"]  # of greedy requests nothing is drawn
GREEDY = [name for name, _ in NAMES if name not in OTHERS]
GREEDY += ["unispec", "spectra", "auto", "suffix decoding, kept"]


@pytest.mark.parametrize(
    ("name", "kind"),
    sparing(NAMES, lambda name, kind: name in (GREEDY if kind == "greedy" else SAMPLED)),
)
def test_requests_that_join_and_leave_are_answered_as_alone(name, kind):
    """Also of drafters that carry stores over, and of greedy ones whose trees have another size at
    every step: what is drafted decides nothing."""
    decoder, random = decoders(SAMPLINGS[kind])[name](), Random(3)
    prompts = [[random.randrange(VOCABULARY) for _ in range(n)] for n in (5, 1, 9, 3, 2, 14, 4)]
    alone = [decoder.generate(ids, seed).ids for seed, ids in enumerate(prompts)]
    if kind == "greedy":
        sizes = cycle((1, 9, 2))
        decoder.allowed = lambda _: next(sizes)
    waiting = [decoder.request(ids, seed) for seed, ids in enumerate(prompts)]
    requests, left, most = list(waiting), None, 0
    while waiting or decoder.running:
        if waiting and (decoder.running is None or random.random() < 0.5):
            count = random.randint(1, 2)
            decoder.start(waiting[:count])
            waiting = waiting[count:]
        if decoder.running is None:
            continue
        most = max(most, len(decoder.running.requests))
        if left is None and len(decoder.running.requests) > 2:
            left = decoder.running.requests[1]
            decoder.finish(left)
            continue
        decoder.step()
    assert most > 2 and left is not None
    for request, expected in zip(requests, alone, strict=True):
        found = decoder.finish(request)
        if request is left:
            assert found.ids == expected[: len(found.ids)]
        else:
            assert found.ids == expected and found.finished in ("end", "length")


@pytest.mark.parametrize("name", ["plain", "deferred", "draft model"])
def test_requests_of_one_batch_sample_each_in_its_own_way(name):
    samplings = [Sampling(), Sampling(0.7), Sampling(1.3, top_k=5), Sampling()]
    prompts = [[3, 1, 4], [9, 2], [6, 5, 3, 5, 8], [7, 7]]
    mixed = decoders(Sampling())[name]()
    requests = [
        mixed.request(ids, 11, sampling=sampling)
        for ids, sampling in zip(prompts, samplings, strict=True)
    ]
    mixed.start(requests)
    while mixed.running:
        mixed.step()
    for ids, sampling, request in zip(prompts, samplings, requests, strict=True):
        assert request.answer.ids == decoders(sampling)[name]().generate(ids, 11).ids


def test_what_joins_leaves_tensors_of_one_kind():
    """Compiled layers are compiled for each kind; a cache that grows is made anew."""
    target = tiny_target()
    engine = Engine(target, PromptLookup(2, 3), Sampling(), Limits(20), 6)
    for ids in ([1, 2, 3], [4, 5] * 20):
        engine.start([engine.request(ids)])
        assert all(each.is_inference() for pair in engine.running.cache.layers for each in pair)


@pytest.mark.parametrize("name", ["draft model", "deferred, drawn"])
def test_trees_that_were_drawn_and_trees_that_were_not_join(name):
    """Greedy requests draw nothing, and with room for one more token alone nothing is drafted."""
    decoder = decoders(SAMPLINGS["sampled"])[name]()
    prompts = [[3, 14, 15], [1, 2], [9], [5, 6, 5]]
    ways = [(Sampling(0.8), 12), (Sampling(0.8), 2), (Sampling(), 12), (Sampling(0.8), 11)]
    for order in ([0, 1, 2, 3], [1, 0, 2, 3], [2, 0, 1, 3], [2, 1, 3, 0]):
        alone, together = [], []
        for place in order:
            sampling, limits = ways[place][0], Limits(ways[place][1])
            given = prompts[place], place, None, sampling, limits
            decoder.start([decoder.request(*given)])
            while decoder.running:
                for request in decoder.step():
                    alone.append(request.generation().ids)
            together.append(decoder.request(*given))
        for request in together:
            decoder.start([request])
            if len(request.tokens) > 3:
                decoder.step()
        while decoder.running:
            decoder.step()
        assert [request.generation().ids for request in together] == alone


def test_every_request_has_its_callback_and_its_limits():
    decoder = decoders(Sampling())["deferred"]()
    told: list[list[int]] = [[], []]
    callbacks = [lambda token, *_, own=own: own.append(token) for own in told]
    answers = decoder.generate_batch([[1, 2], [3]], None, callbacks)
    assert told == [answer.ids for answer in answers]
    short = decoder.request([1, 2], limits=Limits(3))
    decoder.start([short])
    while decoder.running:
        assert decoder.step() in ([], [short])
    assert short.answer.ids == answers[0].ids[:3]


@pytest.mark.parametrize("most", [1, 2, 24])
def test_a_draft_model_reads_what_joins_behind_a_longer_text(most):
    """A request for few tokens is not drafted for, so its prompt is unread until others go on."""
    target = tiny_target()
    engine = Engine(target, DraftModel(tiny_target(seed=1), 3), Sampling(), Limits(24), 6)
    prompts, limits = [[3, 1, 4, 1, 5] * 8, [9, 2, 6, 5] * 10], [Limits(24), Limits(most)]
    plain = PlainDecoder(target, Sampling(), Limits(24))
    requests = [engine.request(ids, limits=own) for ids, own in zip(prompts, limits, strict=True)]
    engine.allowed = lambda count: 1 if count > 1 and len(requests[0].answer.ids) < 6 else 6
    for request in requests:
        engine.start([request])
        engine.step()
    while engine.running:
        engine.step()
    for request, ids, own in zip(requests, prompts, limits, strict=True):
        assert request.answer.ids == plain.generate(ids).ids[: own.max_new_tokens]
