"""Scores of pairs against their definition, spelled out."""

from itertools import pairwise

import pytest
import torch
from tests.tiny import VOCABULARY, tiny_target

from slipstream.speculators.losses import SLICE_BYTES
from slipstream.speculators.streaming.pairs import (
    CopyScores,
    PairScores,
    Transitions,
    normed_embeddings,
    pair_tables,
    vocabulary_table,
)

ROWS, STREAMS, LENGTH = 36, 3, 9


@pytest.fixture
def target():
    return tiny_target()


@pytest.fixture
def copying(target) -> CopyScores:
    copying = CopyScores(target.embedding_size, STREAMS).double()
    with torch.no_grad():
        for parameter in copying.parameters():
            parameter.normal_()
    return copying


@pytest.fixture
def pairs() -> tuple[torch.Tensor, ...]:
    """Streams, parents, texts and their lengths; few tokens, so that pairs recur."""
    return (
        torch.arange(ROWS) % STREAMS,
        torch.randint(0, 4, (ROWS,)),
        torch.randint(0, 4, (ROWS, LENGTH)),
        torch.randint(2, LENGTH + 1, (ROWS,)),
    )


def tables(target, copying) -> list[torch.Tensor]:
    return [table[:, 0] for table in pair_tables(target, None, copying)]


def gains(copying, target, *pairs) -> torch.Tensor:
    nothing = torch.zeros(ROWS, VOCABULARY, dtype=torch.float64)
    return copying.add_to(nothing, *tables(target, copying), *pairs)


def test_a_token_gains_where_the_known_text_has_it_after_the_parent(target, copying, pairs):
    of_parent, of_child = tables(target, copying)
    found = gains(copying, target, *pairs)
    gained = 0
    for row, (stream, parent, text, length) in enumerate(zip(*pairs, strict=True)):
        seen = set(pairwise(text[:length].tolist()))
        for child in range(VOCABULARY):
            expected = 0.0
            if (int(parent), child) in seen:
                terms = copying.stream[stream], of_parent[parent], of_child[child]
                expected = float(sum(terms).detach())
                gained += 1
            value = float(found[row, child].detach())
            assert value == pytest.approx(expected, abs=1e-12)
    assert 0 < gained < ROWS * 4


def test_all_terms_learn(target, copying, pairs):
    gains(copying, target, *pairs).square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in copying.parameters())


def test_drafting_looks_up_what_training_computes(target, copying, pairs):
    transitions = Transitions(target.embedding_size, 4).double()
    with torch.no_grad():
        transitions.child.normal_()
    expected = gains(copying, target, *pairs)
    (children,) = pair_tables(target, transitions, None)
    expected = transitions.add_to(expected, target, pairs[1], children)
    scores = PairScores(target, transitions, copying)
    every = torch.arange(VOCABULARY).expand(1, STREAMS, -1)
    for row, (stream, parent, text, length) in enumerate(zip(*pairs, strict=True)):
        found = scores(parent.expand(1, STREAMS, 1), every, text[None, :length])[0, stream, 0]
        torch.testing.assert_close(found.double(), expected[row], rtol=0, atol=1e-5)


def test_a_text_of_one_token_has_no_pairs(target, copying):
    scores = PairScores(target, None, copying)
    found = scores(torch.tensor([[[5]]]), torch.arange(VOCABULARY)[None, None], torch.tensor([[5]]))
    assert not found.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_small_embeddings_are_brought_to_unit_size_in_every_type(dtype):
    """Those of most models have mean squares below the epsilon of bfloat16."""
    target = tiny_target()
    target.model.to(dtype).get_input_embeddings().weight.mul_(0.02)
    found = normed_embeddings(target, torch.arange(VOCABULARY)).double()
    assert torch.allclose(found.square().mean(-1).sqrt(), torch.ones(()).double(), atol=0.02)
    directions = torch.eye(found.shape[1], dtype=dtype)
    assert torch.allclose(vocabulary_table(target, directions).double(), found, rtol=0.02)


def test_embeddings_that_are_no_table_are_asked_for_a_slice_at_a_time(target, monkeypatch):
    """The same, and the same gradients."""
    directions = torch.randn(3, target.embedding_size, dtype=torch.float64, requires_grad=True)
    monkeypatch.setitem(SLICE_BYTES, "cpu", 4 * 7 * target.embedding_size)
    found = []
    for frozen in (True, False):
        target.model.get_input_embeddings().requires_grad_(not frozen)
        assert (target.embedding_table is not None) == frozen
        table = vocabulary_table(target, directions)
        assert table.shape == (target.vocab_size, 3)
        (gradient,) = torch.autograd.grad(table.sin().sum(), directions)
        found.append((table, gradient))
    for table, other in zip(*found, strict=True):
        torch.testing.assert_close(table, other, rtol=1e-12, atol=1e-12)
