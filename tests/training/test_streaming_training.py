"""What the training of a streaming speculator knows, and when."""

from tests.tiny import VOCABULARY, tiny_target

from slipstream.data.batches import collate
from slipstream.data.rendering import Sample
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.training.streaming import StreamingTraining

SAMPLES = [Sample([5, 9, 5, 9, 7, 5], 3), Sample([4, 8, 4, 8, 8, 1, 2, 30], 5)]


def test_scores_of_pairs_see_the_text_up_to_the_root_and_no_further(monkeypatch):
    training = StreamingTraining(
        tiny_target(), StreamingConfig(num_streams=2, num_msa_layers=2, copy_scores=True),
        learning_rate=1e-3, weight_decay=0.0, warmup_steps=1, stream_weights=None,
        root_dropout=1.0, validation_prompts=1, validation_budget=4, start_from=None,
    ).double()  # fmt: skip
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
