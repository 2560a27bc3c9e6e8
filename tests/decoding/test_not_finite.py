"""A target whose logits are no numbers ends with a sentence, whoever decodes, and whenever."""

from itertools import product
from math import isnan

import pytest
import torch
from tests.commands import refused
from tests.exhaustive import sparing
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.decoding.sprinter import SprinterDecoder
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.streaming import Streaming

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
WAYS = ("plain", "prompt_lookup", "streaming", "draft_model", "sprinter")
CASES = [
    each
    for each in product(WAYS, (0.0, 1.0), (0, 3), (torch.nan, torch.inf))
    if each[:2] != ("sprinter", 0.0)  # which samples
]


def decoder_of(way, target, sampling):
    limits = Limits(24)
    if way == "plain":
        return PlainDecoder(target, sampling, limits)
    if way == "sprinter":
        return SprinterDecoder(target, tiny_target(seed=1), 0.5, sampling, limits, 1.0, 0.5, 4)
    drafter = {
        "prompt_lookup": lambda: PromptLookup(3, 4),
        "streaming": lambda: Streaming(tiny_speculator(target), "deferred", 2),
        "draft_model": lambda: DraftModel(tiny_target(seed=1), 3),
    }[way]()
    return Engine(target, drafter, sampling, limits, budget=4)


@pytest.mark.parametrize(
    ("way", "temperature", "after", "wrong"),
    sparing(CASES, lambda way, _, after, wrong: after and isnan(wrong)),
)
def test_logits_that_are_no_numbers_end_with_a_sentence(
    way, temperature, after, wrong, monkeypatch
):
    target, calls = tiny_target(), []
    decoder = decoder_of(way, target, Sampling(temperature))
    healthy = target.head.forward

    def overflowing(hidden):
        calls.append(hidden)
        logits = healthy(hidden)
        if len(calls) > after:
            logits[..., 7] = wrong
        return logits

    monkeypatch.setattr(target.head, "forward", overflowing)
    message = refused(lambda: decoder.generate(PROMPT, 0))
    assert message.startswith("target: its logits are NaN or infinite")
    assert len(calls) > after


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_a_target_never_writes_are_no_error(temperature, monkeypatch):
    """Some mask tokens with minus infinity."""
    target = tiny_target()
    healthy = target.head.forward

    def masked(hidden):
        logits = healthy(hidden)
        logits[..., 20:] = -torch.inf
        return logits

    monkeypatch.setattr(target.head, "forward", masked)
    answer = decoder_of("prompt_lookup", target, Sampling(temperature)).generate(PROMPT, 0)
    assert len(answer.ids) == 24 and max(answer.ids) < 20
