"""The target's own answers as data: right, cached, resumable."""

import pytest
import torch
from tests.commands import refused
from tests.tiny import VOCABULARY, tiny_target

from slipstream.core.sampling import Sampling
from slipstream.data.batches import collate
from slipstream.data.regeneration import regenerate
from slipstream.decoding.answer import Limits
from slipstream.decoding.plain import PlainDecoder
from slipstream.speculators.labels import NO_LABEL, future_tokens


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


def test_a_complete_cache_is_only_read(tmp_path, monkeypatch):
    target, prompts = ending_target(), some_prompts([4, 6, 4])
    whole = regenerate(target, prompts, 40, tmp_path, Sampling())
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()

    def refusing(*_, **__):
        raise PermissionError(13, "Permission denied")

    for name in ("write_text", "write_bytes", "open", "mkdir"):
        monkeypatch.setattr(type(path), name, refusing)
    monkeypatch.setattr(type(path), "read_bytes", lambda _: content)
    assert regenerate(target, prompts, 40, tmp_path, Sampling()) == whole


def test_torn_lines_are_answered_again_and_block_no_later_run(tmp_path, monkeypatch):
    target, prompts = ending_target(), some_prompts([4, 6, 4, 5])
    whole = regenerate(target, prompts, 40, tmp_path, Sampling(), batch_size=1)
    (path,) = tmp_path.iterdir()
    lines = path.read_bytes().split(b"\n")[:4]
    torn = [lines[0], lines[1][:-3], b"\0\0\0", lines[3][:-1]]
    path.write_bytes(b"\n".join(torn))
    assert regenerate(target, prompts, 40, tmp_path, Sampling(), batch_size=1) == whole
    assert path.read_bytes().startswith(b"\n".join(torn[:3]) + b"\n")  # nothing else was rewritten
    monkeypatch.setattr(PlainDecoder, "generate_batch", None)
    assert regenerate(target, prompts, 40, tmp_path, Sampling(), batch_size=1) == whole


def test_a_cache_that_cannot_be_written_ends_with_one_sentence(tmp_path):
    (tmp_path / "file").write_text("kept")
    prompts, folder = some_prompts([4]), tmp_path / "file" / "below"
    found = refused(lambda: regenerate(ending_target(), prompts, 40, folder, Sampling()))
    assert found.startswith("data.cache_dir: cannot write to")


def test_unfinished_answers_may_be_kept_and_nothing_after_them_is_learned(tmp_path):
    target, prompts = ending_target(), some_prompts([5, 9, 2, 5, 7, 1, 12, 3])
    ended = regenerate(target, prompts, 40, tmp_path, Sampling())
    kept = regenerate(target, prompts, 40, tmp_path, Sampling(), keep_unfinished=True)
    assert [sample.ids[: sample.prompt_length] for sample in kept] == prompts
    unfinished = [sample for sample in kept if sample not in ended]
    assert unfinished and len(kept) == len(ended) + len(unfinished)
    for sample in unfinished:
        assert len(sample.ids) == sample.prompt_length + 40 and 3 not in sample.ids
    # beside a longer one, so that there is padding after its end
    first = unfinished[0]
    batch = collate([first, max(kept, key=lambda sample: len(sample.ids))])
    assert batch.supervised[0].nonzero()[:, 0].tolist() == [*range(len(first.ids))][-40:]
    labels = future_tokens(batch, 3)
    learned = [label for label in labels.next_tokens[0].tolist() if label != NO_LABEL]
    assert learned == first.ids[-40:]
    assert labels.positions[0].tolist() == [*range(len(first.ids) - 41, len(first.ids) - 1)]
    assert labels.tokens[0, -1].tolist() == [NO_LABEL] * 3
    assert labels.tokens[0, -3].tolist() == [*first.ids[-2:], NO_LABEL]
