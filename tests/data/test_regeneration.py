"""The target's own answers as data: right, cached, resumable."""

import pytest
import torch
from tests.tiny import VOCABULARY, tiny_target

from slipstream.core.sampling import Sampling
from slipstream.data import regeneration
from slipstream.data.regeneration import greedy_batch, regenerate
from slipstream.decoding.answer import Limits
from slipstream.decoding.plain import PlainDecoder


def ending_target():
    """A tiny target in whose answers token 3 turns up and ends them."""
    target = tiny_target(vocab_size=VOCABULARY)
    target.model.config.eos_token_id = 3
    return target


def some_prompts(lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def test_a_batch_gives_each_prompt_its_plain_answer():
    target = ending_target()
    prompts = some_prompts([5] * 12)
    answers = greedy_batch(target, torch.tensor(prompts), 20)
    plain = PlainDecoder(target, Sampling(), Limits(20))
    assert answers == [plain.generate(prompt).ids for prompt in prompts]
    assert len({len(answer) for answer in answers}) > 1


def test_answers_are_cached_and_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    target, prompts = ending_target(), some_prompts([4, 6, 4, 5, 6, 4, 4, 5])
    whole = regenerate(target, prompts, 40, tmp_path / "whole", batch_size=2)
    assert all(sample.ids[: sample.prompt_length] in prompts for sample in whole)
    assert all(sample.ids[-1] == 3 for sample in whole)

    done = []

    def breaking(target, ids, limit):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(len(ids))
        return greedy_batch(target, ids, limit)

    monkeypatch.setattr(regeneration, "greedy_batch", breaking)
    with pytest.raises(KeyboardInterrupt):
        regenerate(target, prompts, 40, tmp_path / "parts", batch_size=2)
    file = next((tmp_path / "parts").iterdir())
    file.write_text(file.read_text() + "[3, [1, 2")
    calls = []
    monkeypatch.setattr(
        regeneration,
        "greedy_batch",
        lambda target, ids, limit: calls.append(len(ids)) or greedy_batch(target, ids, limit),
    )
    assert regenerate(target, prompts, 40, tmp_path / "parts", batch_size=2) == whole
    assert sum(calls) == len(prompts) - sum(done)
    calls.clear()
    assert regenerate(target, prompts, 40, tmp_path / "parts", batch_size=2) == whole
    assert not calls
