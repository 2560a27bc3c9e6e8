"""What the training of a streaming speculator knows, and when."""

import torch
from tests.tiny import VOCABULARY, tiny_speculator, tiny_target

from slipstream.data.batches import collate
from slipstream.data.rendering import Sample
from slipstream.training.segments import lossless_losses

SAMPLES = [Sample([5, 9, 5, 9, 7, 5], 3), Sample([4, 8, 4, 8, 8, 1, 2, 30], 5)]


def test_scores_of_pairs_see_the_text_up_to_the_root_and_no_further(monkeypatch):
    target = tiny_target()
    speculator = tiny_speculator(target, num_streams=2, copy_scores=True)
    calls = []
    score = speculator.add_pair_scores

    def watched(target, logits, streams, parents, texts, lengths):
        calls.append((streams, parents, texts, lengths))
        return score(target, logits, streams, parents, texts, lengths)

    monkeypatch.setattr(speculator, "add_pair_scores", watched)
    lossless_losses(target, speculator, collate(SAMPLES), torch.ones(2), None)
    [(streams, parents, texts, lengths)] = calls
    known = [text[:length].tolist() for text, length in zip(texts, lengths, strict=True)]
    expected = [
        (stream, sample.ids[: end + 1], sample.ids[end + stream])
        for sample in SAMPLES
        for end in range(sample.prompt_length, len(sample.ids))
        for stream in range(2)
        if end + stream + 1 < len(sample.ids)
    ]
    assert list(zip(streams.tolist(), known, parents.tolist(), strict=True)) == expected
    assert all(0 <= parent < VOCABULARY for parent in parents.tolist())
