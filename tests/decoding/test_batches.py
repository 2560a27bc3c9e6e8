"""Batches: the answers of prompts alone, also in float32, and no work for those that are done."""

from itertools import product

import pytest
import torch
from tests.exhaustive import sparing
from tests.tiny import tiny_target

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Generation, Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.prompts import PromptSets
from slipstream.targets.loading import load_target

ONCE = (None, 16), ("fused", 8), ("deferred", 4)
LIMITS = Limits(32)


@pytest.fixture(scope="module")
def target():
    return load_target("slipstream/small-target")


@pytest.fixture(scope="module")
def prompts(target) -> list[list[int]]:
    """Sixteen, of two tasks."""
    texts = PromptSets(None, None, ["data_to_text", "text_to_sql"], "test", 0).take(16)
    return [render_prompt(target.tokenizer, prompt.text) for prompt in texts]


@pytest.fixture(scope="module")
def alone(target, prompts) -> list[Generation]:
    """Their answers by plain decoding, one at a time."""
    plain = PlainDecoder(target, Sampling(), LIMITS)
    answers = [plain.generate(ids) for ids in prompts]
    assert len({len(answer.ids) for answer in answers}) > 4
    return answers


@pytest.mark.parametrize(
    ("schedule", "size"),
    sparing(product([None, "fused", "deferred"], (1, 2, 4, 8, 16)), lambda *each: each in ONCE),
)
def test_every_size_gives_the_answers_of_prompts_alone(target, prompts, alone, schedule, size):
    decoder = PlainDecoder(target, Sampling(), LIMITS)
    if schedule is not None:
        drafter = Streaming("slipstream/small-streaming", schedule, 4)
        decoder = Engine(target, drafter, Sampling(), LIMITS, 8)
    for start in range(0, len(prompts), size):
        together = decoder.generate_batch(prompts[start : start + size])
        expected = alone[start : start + size]
        assert [each.ids for each in together] == [each.ids for each in expected]
        assert [each.text for each in together] == [each.text for each in expected]


def test_finished_sequences_cost_nothing_more(monkeypatch):
    """Every step runs rows for those alone that still go on: one for each token it decides."""
    target, batch = tiny_target(), [[3, 1, 4], [9, 2], [6, 5, 3, 5, 8, 9], [7]]
    decoder = PlainDecoder(target, Sampling(), Limits(24))
    endless = [decoder.generate(ids).ids for ids in batch]
    target.model.generation_config.eos_token_id = [endless[0][3], endless[2][9]]
    rows, run = [], target.forward

    def counted(ids, *arguments, **options):
        rows.append(ids.numel())
        return run(ids, *arguments, **options)

    monkeypatch.setattr(target, "forward", counted)
    answers = decoder.generate_batch(batch)
    assert len({len(answer.ids) for answer in answers}) > 1
    assert rows == sorted(rows, reverse=True)
    assert sum(rows[1:]) == sum(len(answer.ids) - 1 for answer in answers)
    assert [answer.statistics.target_forwards for answer in answers] == [
        len(answer.ids) - 1 for answer in answers
    ]


@pytest.mark.parametrize(
    "batch, expected",
    [
        ([[1, 2], []], "prompt 1 of the batch: it has no tokens"),
        ([[1] * 64, [1, 2]], "prompt 0 of the batch: 64 tokens do not fit the target's context"),
        ([[]], "prompt: it has no tokens"),
    ],
)
def test_prompts_that_cannot_be_answered_are_one_sentence(batch, expected):
    target = tiny_target(max_position_embeddings=64)
    decoders = (
        PlainDecoder(target, Sampling(), Limits(4)),
        Engine(target, PromptLookup(2, 3), Sampling(), Limits(4), 4),
    )
    for decoder in decoders:
        with pytest.raises(InputError, match=expected) as caught:
            decoder.generate_batch(batch)
        assert "\n" not in str(caught.value)
        assert decoder.generate_batch([]) == []


def test_memory_of_masks_and_caches_is_linear_in_the_prompt(target, monkeypatch):
    """Prompts run in parts, so no mask has more rows than a part."""
    sizes, run = [], target.forward

    def seen(ids, positions, mask, cache, *arguments, **options):
        sizes.append((0 if mask is None else mask.numel(), cache.nbytes / cache.capacity))
        return run(ids, positions, mask, cache, *arguments, **options)

    monkeypatch.setattr(target, "forward", seen)
    monkeypatch.setattr("slipstream.decoding.decoder.PREFILL_ROWS", 64)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 4000, (960,), generator=generator).tolist()
    PlainDecoder(target, Sampling(), Limits(2)).generate(ids)
    assert max(size for size, _ in sizes) <= 64 * (960 + 2)
    assert len({slot for _, slot in sizes}) == 1
