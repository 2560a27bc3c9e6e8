"""Shared mode: the main stream sees its streams, in decoding exactly as in training."""

from itertools import product

import pytest
import torch
from tests.decoding import options as every_option
from tests.exhaustive import sparing
from tests.tiny import ARCHITECTURES, tiny_speculator, tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.streaming import Streaming
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.target import Target

PROMPT = [3, 17, 5, 29, 11, 8]
LENGTH = 12


def pair(architecture: str, **arguments) -> tuple[Target, StreamingSpeculator]:
    target = tiny_target(architecture)
    return target, tiny_speculator(target, seed=2, mode="shared", **arguments)


def recomputed(target: Target, speculator: StreamingSpeculator) -> list[int]:
    return every_option.recomputed(target, speculator, PROMPT, LENGTH)[0]


def answer(target, speculator, budget: int, **options) -> list[int]:
    drafter = Streaming(speculator, "fused", **({"top_k": 3} | options))
    engine = Engine(target, drafter, Sampling(), Limits(LENGTH), budget)
    return engine.generate(PROMPT).ids


VARIANTS = [
    dict(),
    dict(initialisation_rank=2, stream_positions="same", pruning_layer=1),
    dict(attended_tokens=3, pruning_layer=3),
    dict(value_rotation=0.005, num_msa_layers=4, num_streams=2),
]
# Each option of the Llama is proven in test_every_option.py, with its logits.
ONCE = ("gpt2", VARIANTS[1]), ("phi3", VARIANTS[2])


@pytest.mark.parametrize(
    ("architecture", "options"),
    sparing(product(sorted(ARCHITECTURES), VARIANTS), lambda *each: each in ONCE),
)
def test_greedy_output_is_that_of_recomputing_everything(architecture, options):
    target, speculator = pair(architecture, **options)
    expected = recomputed(target, speculator)
    assert len(set(expected)) > 1
    for budget in (1, 7):
        assert answer(target, speculator, budget) == expected, budget
    assert answer(target, speculator, 12, prune_threshold=0.05, prune_cap=4) == expected


def test_the_streams_matter_to_the_main_stream():
    """Without them the same weights write something else: the mode is not lossless by accident."""
    target, speculator = pair("llama")
    expected = recomputed(target, speculator)
    with torch.no_grad():
        speculator.embeddings.mul_(-4)
    assert recomputed(target, speculator) != expected


def test_the_target_itself_is_not_changed():
    target = tiny_target("llama")
    weights = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    speculator = tiny_speculator(target, mode="shared")
    answer(target, speculator, 5)
    after = target.model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())
