"""The target's own answers as data: right, cached, resumable."""

import pytest
import torch
from tests.tiny import VOCABULARY, tiny_target

from slipstream.core.sampling import Sampling
from slipstream.data.regeneration import regenerate
from slipstream.decoding.answer import Limits
from slipstream.decoding.plain import PlainDecoder


def ending_target():
    """A tiny target in whose answers token 3 turns up and ends them."""
    target = tiny_target(vocab_size=VOCABULARY)
    target.model.generation_config.eos_token_id = 3
    return target


def some_prompts(lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def test_the_answers_are_the_plain_ones(tmp_path):
    target, prompts = ending_target(), some_prompts([5, 9, 2, 5, 7, 1, 12, 3])
    plain = PlainDecoder(target, Sampling(), Limits(40))
    answers = [plain.generate(prompt) for prompt in prompts]
    expected = [
        prompt + answer.ids
        for prompt, answer in zip(prompts, answers, strict=True)
        if answer.finished == "end"
    ]
    assert 1 < len(expected) < len(prompts)
    found = regenerate(target, prompts, 40, tmp_path, Sampling(), batch_size=3)
    assert [sample.ids for sample in found] == expected


def test_answers_are_cached_and_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    target, prompts = ending_target(), some_prompts([4, 6, 4, 5, 6, 4, 4, 5])
    whole = regenerate(target, prompts, 40, tmp_path / "whole", Sampling(), batch_size=2)
    assert all(sample.ids[: sample.prompt_length] in prompts for sample in whole)
    assert all(sample.ids[-1] == 3 for sample in whole)

    done, answer = [], PlainDecoder.generate_batch

    def breaking(decoder, batch, seeds):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(len(batch))
        return answer(decoder, batch, seeds)

    monkeypatch.setattr(PlainDecoder, "generate_batch", breaking)
    with pytest.raises(KeyboardInterrupt):
        regenerate(target, prompts, 40, tmp_path / "parts", Sampling(), batch_size=2)
    file = next((tmp_path / "parts").iterdir())
    file.write_text(file.read_text() + "[3, [1, 2")
    calls = []
    monkeypatch.setattr(
        PlainDecoder,
        "generate_batch",
        lambda decoder, batch, seeds: calls.append(len(batch)) or answer(decoder, batch, seeds),
    )
    assert regenerate(target, prompts, 40, tmp_path / "parts", Sampling(), batch_size=2) == whole
    assert sum(calls) == len(prompts) - sum(done)
    calls.clear()
    assert regenerate(target, prompts, 40, tmp_path / "parts", Sampling(), batch_size=2) == whole
    assert not calls
