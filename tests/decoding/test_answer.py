"""Where answers end, what is counted, and what callers are told while they grow."""

import pytest
import torch
from tests.tiny import tiny_target
from transformers import AutoModelForCausalLM

import slipstream
from slipstream.assets import locate
from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.streaming import Streaming
from slipstream.targets.loading import load_target

PROMPT = "name[The Punter], eatType[pub], food[Italian], priceRange[cheap], area[riverside]"


@pytest.fixture(scope="module")
def small():
    return load_target("slipstream/small-target")


def test_the_end_token_inside_an_accepted_path_ends_the_answer():
    """A perfect draft runs past the end token; nothing after it is emitted or counted."""
    target = tiny_target()
    free = PlainDecoder(target, Sampling(), Limits(30)).generate([1, 2, 3]).ids
    end = next(token for token in free[4:] if token not in free[:4])
    target.model.generation_config.eos_token_id = end
    length = free.index(end) + 1
    engine = Engine(target, DraftModel(target, 8), Sampling(), Limits(30), budget=9)
    generation = engine.generate([1, 2, 3])
    assert generation.ids == free[:length] and generation.finished == "end"
    assert generation.statistics.tokens == length
    assert generation.statistics.tau <= length - 1


def test_stop_strings_cut_the_text_in_the_middle_of_an_accepted_path(small):
    whole = slipstream.generate(PROMPT, small)
    stop = whole.text[20:24]
    short = slipstream.generate(PROMPT, small, stop=[stop])
    assert short.finished == "stop"
    assert short.text == whole.text[: whole.text.index(stop)]
    assert short.ids == whole.ids[: len(short.ids)] and len(short.ids) < len(whole.ids)


def test_the_limit_is_kept_and_the_context_is_never_left():
    target = tiny_target("opt", max_position_embeddings=20)
    for count in (1, 2, 7, 50):
        engine = Engine(target, DraftModel(target, 6), Sampling(), Limits(count), budget=7)
        generation = engine.generate([1, 2, 3])
        assert len(generation.ids) == min(count, 17) and generation.finished == "length"
    with pytest.raises(InputError, match="context of 20"):
        engine.generate(list(range(20)))


def test_text_and_tokens_are_told_as_they_are_decided(small):
    pieces, tokens = [], []
    answer = slipstream.generate(PROMPT, small, on_text=pieces.append)
    assert "".join(pieces) == answer.text and len(pieces) > 3
    engine = Engine(small, Streaming("slipstream/small-streaming", "deferred", 4), Sampling(),
                    Limits(96), budget=10)  # fmt: skip
    ids = render_prompt(small.tokenizer, PROMPT)
    again = engine.generate(ids, callback=lambda token, drafted: tokens.append((token, drafted)))
    assert [token for token, _ in tokens] == again.ids
    drafted = sum(was_drafted for _, was_drafted in tokens)
    assert 0 < drafted < len(tokens)
    assert drafted >= again.statistics.tokens - 1 - again.statistics.target_forwards


def test_the_time_shares_add_up(small):
    numbers = slipstream.generate(PROMPT, small).statistics
    assert set(numbers.shares) == {"prefill", "draft", "verify"}
    assert all(share > 0 for share in numbers.shares.values())
    assert 0 < numbers.overhead < numbers.seconds


def test_statistics_count_as_defined():
    """Two answers of 5 and 7 tokens in 2 and 3 forwards after prefill: tau (4 + 6) / 5."""
    total = Statistics(1, 5, 2, 0.5, {"draft": 0.1}) + Statistics(1, 7, 3, 0.5, {"verify": 0.2})
    assert total.tau == 2.0 and total.mean_accepted_draft_tokens == 1.0
    assert total.tokens_per_second == 12.0
    assert total.overhead == pytest.approx(0.7)


def test_through_transformers_generate():
    target = tiny_target()
    ids = torch.tensor([[1, 2, 3, 4]])
    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    expected = target.model.generate(ids, **options)
    found = target.model.generate(
        ids, custom_generate=slipstream.custom_generate, drafter=DraftModel(target, 4), **options
    )
    assert found.tolist() == expected.tolist()
    with pytest.raises(InputError, match="one prompt at a time"):
        target.model.generate(
            ids.repeat(2, 1),
            custom_generate=slipstream.custom_generate,
            drafter=DraftModel(target, 4),
            **options,
        )


@pytest.mark.parametrize("setting", [{"repetition_penalty": 1.5}, {"max_time": 1.0}])
def test_custom_generate_refuses_settings_it_would_not_keep(setting):
    target = tiny_target()
    with pytest.raises(InputError, match="is not supported; leave out"):
        target.model.generate(
            torch.tensor([[1, 2, 3]]),
            custom_generate=slipstream.custom_generate,
            drafter=DraftModel(target, 4),
            max_new_tokens=5,
            pad_token_id=0,
            **setting,
        )


def test_answers_end_at_the_end_tokens_of_the_generation_config():
    """Chat models list more of them there than in their config; `generate` obeys that list."""
    target = tiny_target()
    free = PlainDecoder(target, Sampling(), Limits(30)).generate([1, 2, 3]).ids
    end = next(token for token in free[4:] if token not in free[:4])
    other = next(token for token in range(target.vocab_size) if token not in free)
    target.model.generation_config.eos_token_id = [other, end]
    answer = PlainDecoder(target, Sampling(), Limits(30)).generate([1, 2, 3])
    assert answer.finished == "end" and answer.ids == free[: free.index(end) + 1]


def test_the_shipped_speculator_through_transformers_generate(small):
    """As the README shows it: a plain transformers model, no tokenizer in sight."""
    model = AutoModelForCausalLM.from_pretrained(locate(small.name), dtype=torch.float32)
    ids = torch.tensor([render_prompt(small.tokenizer, PROMPT)])
    drafter = Streaming("slipstream/small-streaming", schedule="deferred", top_k=4)
    found = model.generate(
        ids, custom_generate=slipstream.custom_generate, drafter=drafter, max_new_tokens=40
    )
    assert found.tolist() == model.generate(ids, max_new_tokens=40, do_sample=False).tolist()


def test_sampling_depends_on_the_seed_alone(small):
    answers = [
        slipstream.generate(PROMPT, small, temperature=1.0, seed=seed).text for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1] != answers[2]
