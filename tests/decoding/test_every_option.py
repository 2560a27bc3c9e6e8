"""Greedy identity in both modes, for every option: tokens and logits of one token per forward."""

import pytest
import torch
from tests.decoding.options import (
    DOUBLED,
    OPTIONS,
    PRUNED,
    SCHEDULES,
    TREES,
    Watched,
    drafter_of,
    pair_of,
    recomputed,
)
from tests.exhaustive import sparing
from tests.tiny import ARCHITECTURES, BUILT_AS_LLAMA, tiny_speculator, tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.streaming import Streaming
from slipstream.speculators.streaming import steps as streams
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.target import Target

PROMPT = [3, 1, 5, 2, 4, 1, 0]
VOCABULARY, LENGTH = 12, 10
IN_EVERY_FAMILY = ("paper", "many")
IN_TWO_FAMILIES = ("msa_layers_1", "attended_3", "same_positions", "rotated_values", "skipped_mlp")
CASES = [
    (architecture, mode, name)
    for architecture in sorted(ARCHITECTURES)
    for mode, options in OPTIONS.items()
    for name in options
    if architecture == "llama"
    or name in IN_EVERY_FAMILY
    or (architecture == "gpt2" and name in IN_TWO_FAMILIES)
]


def answer(
    target: Target, speculator: StreamingSpeculator, schedule: str, tree: str
) -> tuple[list[int], Watched]:
    drafter, budget = drafter_of(speculator, schedule, tree)
    engine = Engine(target, drafter, Sampling(), Limits(LENGTH), budget)
    return engine.generate(PROMPT).ids, drafter


def once(architecture: str, mode: str, name: str) -> bool:
    """Each option and both modes in one family, all of them together in the others."""
    if architecture == "llama":
        return name not in DOUBLED
    return name == "many" and mode == "lossless"


@pytest.mark.parametrize(("architecture", "mode", "name"), sparing(CASES, once))
def test_greedy_output_is_that_of_one_token_per_forward(architecture, mode, name):
    """Logits too: a wrong one seldom changes the most probable token of so small a model."""
    target, speculator = pair_of(mode, OPTIONS[mode][name], architecture, vocab_size=VOCABULARY)
    tokens, logits = recomputed(target, speculator, PROMPT, LENGTH)
    # transformers' own GPT-Neo, the reference, computes its scores in float32.
    tolerance = 1e-5 if (architecture, mode) == ("gpt_neo", "lossless") else 1e-10
    trees = TREES if (architecture, name) == ("llama", "paper") else ("best_first", "pruned")
    for schedule in SCHEDULES[mode]:
        for tree in trees:
            found, drafter = answer(target, speculator, schedule, tree)
            assert found == tokens, (schedule, tree)
            torch.testing.assert_close(drafter.logits, logits, rtol=0, atol=tolerance)
            assert drafter.pruned == (tree in PRUNED), (schedule, tree)


@pytest.mark.parametrize(
    ("architecture",),
    sparing(
        zip(sorted(ARCHITECTURES.keys() - {"opt"})),
        lambda each: each not in BUILT_AS_LLAMA,
    ),
)
def test_streams_without_the_mlp_decode_batches(architecture):
    """The rows that the MLP still sees are a part of the batch that lies in pieces."""
    target = tiny_target(architecture, vocab_size=VOCABULARY)
    speculator = tiny_speculator(target, seed=2, mlp="adapter")
    prompts = [PROMPT, PROMPT[:3]]
    plain = PlainDecoder(target, Sampling(), Limits(LENGTH))
    for schedule in ("fused", "deferred"):
        drafter = Streaming(speculator, schedule, 2)
        found = Engine(target, drafter, Sampling(), Limits(LENGTH), 6).generate_batch(prompts)
        assert [each.ids for each in found] == [plain.generate(each).ids for each in prompts]


@pytest.mark.parametrize("mode", OPTIONS)
def test_the_trees_are_what_they_are_called(mode):
    target, speculator = pair_of(mode, OPTIONS[mode]["paper"], vocab_size=VOCABULARY)
    sizes, deepest = {}, {}
    for name in TREES:
        _, drafter = answer(target, speculator, "fused", name)
        first = drafter.proposed[0]
        sizes[name], deepest[name] = len(first), drafter.deepest
        if "chain" in name:
            assert first.parents == [-1, 0, 1, 2]
        if "full" in name:
            assert [first.depths().count(depth) for depth in range(4)] == [1, 2, 4, 8]
    assert sizes == {name: tree["budget"] for name, tree in TREES.items()}
    assert deepest["full"] > 1 and deepest["pruned_full"] > 1


def blind_to_streams(chosen, num_rows, num_streams):
    return chosen.new_zeros(len(chosen), num_rows, chosen.shape[1] * num_streams, dtype=torch.bool)


def test_main_rows_that_do_not_see_their_streams_are_noticed(monkeypatch):
    target, speculator = pair_of("shared", {}, vocab_size=VOCABULARY)
    tokens, _ = recomputed(target, speculator, PROMPT, LENGTH)
    assert answer(target, speculator, "fused", "best_first")[0] == tokens
    monkeypatch.setattr(streams, "own_streams", blind_to_streams)
    assert answer(target, speculator, "fused", "best_first")[0] != tokens
