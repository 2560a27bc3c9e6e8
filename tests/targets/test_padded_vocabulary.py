"""Models of one tokenizer whose vocabularies are padded differently, as Qwen2.5's of 7B and 0.5B.

What is drafted is within the target's vocabulary, and what the smaller one does not know has no
probability.
"""

import pytest
import torch
from tests.decoding.test_greedy_identity import prompts, reference
from tests.tiny import VOCABULARY, tiny_target, tiny_tokenizer

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.draft_model import DraftModel
from slipstream.targets.loading import of_same_vocabulary
from slipstream.targets.target import Target

WORDS = 30
"""Of the tokenizer; the vocabularies are padded beyond them."""


def model_of(size: int, seed: int, **changes) -> Target:
    own = tiny_target(seed=seed, vocab_size=size, **changes)
    return Target(own.model, tiny_tokenizer(WORDS))


@pytest.mark.parametrize("sizes", [(VOCABULARY, WORDS), (WORDS + 2, VOCABULARY)])
def test_a_draft_model_may_be_padded_otherwise(sizes):
    """Untrained targets answer with padding, too: the smaller draft model reads it, and never
    drafts it."""
    target, draft = model_of(sizes[0], 1), model_of(sizes[1], 5, num_hidden_layers=1)
    drafter = DraftModel(draft, 4)
    engine = Engine(target, drafter.attached(target), Sampling(), Limits(24), 8)
    texts = [[token % sizes[0] for token in ids] for ids in prompts(3)]
    for answer, ids in zip(engine.generate_batch(texts, [0] * len(texts)), texts, strict=True):
        assert answer.ids == reference(target, ids)
    if sizes[0] > sizes[1]:
        assert any(token >= WORDS for ids in texts for token in reference(target, ids))
    assert draft.vocab_size == sizes[1]


def test_padding_is_never_drafted():
    """The target itself drafts, with rows of padding that are often the likeliest."""
    target, padded = model_of(VOCABULARY, 1), model_of(VOCABULARY + 5, 2)
    weights = padded.model.state_dict()
    for name, tensor in target.model.state_dict().items():
        weights[name][: len(tensor)] = tensor
    padded.head.weight.data[VOCABULARY:] = 2 * padded.head.weight.data[:5]
    assert any(token >= VOCABULARY for token in reference(padded, [1, 2, 3]))
    engine = Engine(target, DraftModel(padded, 4).attached(target), Sampling(), Limits(24), 8)
    answer = engine.generate([1, 2, 3], 0)
    assert answer.ids == reference(target, [1, 2, 3])
    assert answer.statistics.tau > 4


def test_logits_are_cut_or_filled_up():
    target = model_of(VOCABULARY, 1)
    states = torch.randn(3, target.hidden_size, dtype=target.dtype)
    own, fewer = target.logits(states), target.of_vocabulary(WORDS).logits(states)
    more = target.of_vocabulary(VOCABULARY + 3).logits(states)
    assert torch.equal(fewer, own[:, :WORDS]) and torch.equal(more[:, :VOCABULARY], own)
    assert not more.softmax(-1)[:, VOCABULARY:].any()
    assert target.of_vocabulary(VOCABULARY) is target


def test_other_tokens_are_refused():
    target = model_of(VOCABULARY, 1)
    with pytest.raises(InputError, match=r"^draft: .*another vocabulary"):
        of_same_vocabulary(Target(target.model, tiny_tokenizer(WORDS, "v")), target, "draft")
    with pytest.raises(InputError, match="another vocabulary"):  # no tokenizer tells
        of_same_vocabulary(Target(tiny_target(vocab_size=39).model), target, "draft")
