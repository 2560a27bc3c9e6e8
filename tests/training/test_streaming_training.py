"""What the training of a streaming speculator knows, and when."""

import torch
from tests.tiny import VOCABULARY, tiny_target

from slipstream.data.batches import collate
from slipstream.data.rendering import Sample
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.training.streaming import StreamingTraining

SAMPLES = [Sample([5, 9, 5, 9, 7, 5], 3), Sample([4, 8, 4, 8, 8, 1, 2, 30], 5)]


def training_of(**arguments) -> StreamingTraining:
    torch.manual_seed(0)
    config = StreamingConfig(num_streams=2, num_msa_layers=2, **arguments)
    return StreamingTraining(
        tiny_target(), config, learning_rate=1e-3, weight_decay=0.0, warmup_steps=1,
        stream_weights=None, root_dropout=1.0, validation_prompts=1, validation_budget=4,
        start_from=None,
    ).double()  # fmt: skip


def test_scores_of_pairs_learn_on_top_of_streams_that_learn_without_them():
    gradients = []
    for arguments in (dict(), dict(copy_scores=True, transition_rank=2)):
        training = training_of(**arguments)
        training.losses(collate(SAMPLES))[0].sum().backward()
        gradients.append({n: p.grad for n, p in training.speculator.named_parameters()})
    plain, scored = gradients
    learns = {name for name, gradient in scored.items() if gradient is not None}
    assert {"copying.stream", "transitions.child"} <= learns
    for name, gradient in plain.items():
        if gradient is not None:
            torch.testing.assert_close(scored[name], gradient, rtol=0, atol=1e-12)


def test_scores_of_pairs_see_the_text_up_to_the_root_and_no_further(monkeypatch):
    training = training_of(copy_scores=True)
    calls = []
    score = training.speculator.add_pair_scores

    def watched(target, logits, parents, texts, lengths):
        calls.append((parents, texts, lengths))
        return score(target, logits, parents, texts, lengths)

    monkeypatch.setattr(training.speculator, "add_pair_scores", watched)
    training.losses(collate(SAMPLES))
    [(parents, texts, lengths)] = calls
    known = [text[:length].tolist() for text, length in zip(texts, lengths, strict=True)]
    assert known == [
        sample.ids[:end]
        for sample in SAMPLES
        for end in range(sample.prompt_length + 1, len(sample.ids) + 1)
    ]
    assert parents[:, 0].tolist() == [text[-1] for text in known]
    assert all(0 <= parent < VOCABULARY for parent in parents.flatten().tolist())
