"""Compiled steps: the tokens of the eager ones, whatever is compiled, padded or replayed."""

import pytest
import torch
from tests.exhaustive import sparing
from tests.tiny import tiny_speculator, tiny_target
from torch.utils._pytree import tree_map_only

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.decoding.sprinter import SprinterDecoder
from slipstream.drafters import base
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.streaming import Streaming
from slipstream.speculators.classifiers import SprinterConfig, SprinterVerifier
from slipstream.targets import compiled
from slipstream.targets.compiled import compile_target
from slipstream.targets.loading import load_target

LIMITS = Limits(max_new_tokens=24)
BATCH = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]]


class Replay:
    """A graph's stand-in on the CPU: buffers filled anew, and a function of these alone."""

    made = 0

    def __init__(self, run, inputs, kept):
        Replay.made += 1
        self.run, self.inputs = run, [None if each is None else each.clone() for each in inputs]

    def __call__(self, inputs):
        for own, given in zip(self.inputs, inputs, strict=True):
            assert (own is None) == (given is None)
            if own is not None:
                assert own.shape == given.shape
                own.copy_(given)
        return tree_map_only(torch.Tensor, torch.clone, self.run(*self.inputs))


@pytest.fixture
def replayed(monkeypatch):
    """Steps of few slots at a time, captured and replayed, with nothing compiled (for speed)."""
    monkeypatch.setattr(compiled, "GRANULARITY", 8)
    monkeypatch.setattr(compiled, "CAPACITY", 32)
    monkeypatch.setattr(compiled, "_Graph", Replay)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(Replay, "made", 0)

    def compile_(target):
        compile_target(target, "reduce-overhead").compiled.replays = True
        return target

    return compile_


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
    "pruned": lambda target: Engine(
        target,
        Streaming(tiny_speculator(target, seed=2), "fused", 2, prune_threshold=0.05, prune_cap=3),
        Sampling(),
        LIMITS,
        6,
    ),
}


@pytest.mark.parametrize(
    ("architecture",), sparing([("llama",), ("mistral",)], lambda name: name == "mistral")
)
@pytest.mark.parametrize("name", DECODERS)
def test_replayed_steps_give_the_tokens_of_eager_ones(replayed, name, architecture):
    changes = {"sliding_window": 6} if architecture == "mistral" else {}
    eager = DECODERS[name](tiny_target(architecture, **changes))
    ours = DECODERS[name](replayed(tiny_target(architecture, **changes)))
    for _ in range(2):  # the second time over the buffers and graphs of the first
        assert [ours.generate(ids, 1).ids for ids in BATCH] == [
            eager.generate(ids, 1).ids for ids in BATCH
        ]
        made = Replay.made
        together = ours.generate_batch(BATCH, [1, 2, 3])
        expected = eager.generate_batch(BATCH, [1, 2, 3])
        assert [each.ids for each in together] == [each.ids for each in expected]
    assert 0 < made <= Replay.made


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
    waits, read = [], base.on_host
    monkeypatch.setattr(base, "on_host", lambda *given: waits.append(1) or read(*given))
    for schedule in ("fused", "deferred"):
        target, waits[:] = tiny_target(), []
        engine = Engine(target, streams(target, schedule), Sampling(), LIMITS, 6)
        steps = engine.generate(BATCH[0]).statistics.target_forwards
        assert len(waits) == steps + 1  # the prefill's


def test_compiled_layers_compute_what_the_eager_ones_do():
    """The real compiler, on one small span."""
    eager, ours = tiny_target(), compile_target(tiny_target(), "reduce-overhead")
    decoders = [PlainDecoder(target, Sampling(), Limits(4)) for target in (eager, ours)]
    assert decoders[0].generate(BATCH[0]).ids == decoders[1].generate(BATCH[0]).ids


def test_automatic_compilation_is_for_accelerators():
    assert compile_target(tiny_target(), "auto").compiled is None
    assert compile_target(tiny_target(), "off").compiled is None


def test_a_drafter_is_attached_once_to_a_target(replayed):
    """A second engine runs over the graphs of the first."""
    target = replayed(tiny_target())
    drafter = streams(target, "deferred")
    made = []
    for _ in range(2):
        engine = Engine(target, drafter.attached(target), Sampling(), LIMITS, 6)
        engine.generate(BATCH[0])
        made.append(Replay.made)
    assert made[0] == made[1]


def test_what_cannot_be_compiled_says_so():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(InputError, match="rotary positions that depend on the length"):
        compile_target(tiny_target(rope_parameters=rope), "reduce-overhead")
    with pytest.raises(InputError, match=r"engine\.compile: must be one of auto, off, reduce-"):
        compile_target(tiny_target(), "max")
    packed = load_target("slipstream/small-draft")
    with pytest.raises(InputError, match=r"set target\.packed=false, or engine\.compile=off"):
        compile_target(packed, "reduce-overhead")
    assert compile_target(packed, "auto").compiled is None
