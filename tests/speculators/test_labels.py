"""Which positions carry streams and what they predict."""

import torch

from slipstream.data.batches import Batch, RowBatches, TokenBatches, collate
from slipstream.data.rendering import Sample
from slipstream.speculators.losses import NO_LABEL, future_tokens


def test_the_docstring_example():
    batch = Batch(
        torch.tensor([[5, 6, 7, 8]]), torch.tensor([4]), torch.tensor([[False, False, True, True]])
    )
    labels = future_tokens(batch, 2)
    assert labels.positions.tolist() == [[1, 2]]
    assert labels.next_tokens.tolist() == [[7, 8]]
    assert labels.tokens.tolist() == [[[8, NO_LABEL], [NO_LABEL, NO_LABEL]]]


def test_labels_of_a_padded_batch_equal_those_of_each_sample():
    samples = [Sample([1, 2, 3, 4, 5, 6], 2), Sample([1, 2, 3, 9], 3)]
    together = future_tokens(collate(samples), 3)
    for row, sample in enumerate(samples):
        alone = future_tokens(collate([sample]), 3)
        count = len(sample.ids) - sample.prompt_length
        assert together.positions[row, :count].tolist() == alone.positions[0].tolist()
        assert together.tokens[row, :count].tolist() == alone.tokens[0].tolist()
        assert together.next_tokens[row, count:].eq(NO_LABEL).all()
        assert together.tokens[row, count:].eq(NO_LABEL).all()


def test_every_sample_comes_once_an_epoch_in_another_order():
    samples = [Sample(list(range(length)), 1) for length in range(3, 90)]
    loader = TokenBatches(samples, batch_tokens=200, seed=1, shuffle=True)
    epochs = [[batch.lengths.tolist() for batch in loader] for _ in range(2)]
    assert len(epochs[0]) == len(epochs[1]) == len(loader)
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(length for batch in epoch for length in batch) == list(range(3, 90))
    assert all(batch.ids.numel() <= 200 for batch in loader)


def test_a_loader_goes_on_where_its_state_was_taken():
    samples = [Sample(list(range(length)), 1) for length in range(3, 60)]
    loader, other = (TokenBatches(samples, 150, seed=1, shuffle=True) for _ in range(2))
    list(loader)
    epoch = iter(loader)
    seen = [next(epoch).lengths.tolist() for _ in range(3)]
    other.load_state_dict(loader.state_dict())
    rest = [batch.lengths.tolist() for batch in epoch]
    assert [batch.lengths.tolist() for batch in other] == rest
    assert seen and not any(batch in rest for batch in seen)
    assert len(list(other)) == len(loader)


def test_rows_go_on_in_the_middle_of_an_epoch():
    loader, other = (RowBatches((torch.arange(60),), 8, seed=1, shuffle=True) for _ in range(2))
    epoch = iter(loader)
    seen = [next(epoch)[0] for _ in range(3)]
    other.load_state_dict(loader.state_dict())
    rest = [rows for (rows,) in epoch]
    assert [rows.tolist() for (rows,) in other] == [rows.tolist() for rows in rest]
    order = torch.cat(seen + rest).tolist()
    assert sorted(order) == list(range(60)) != order


def test_every_batch_has_as_many_segments_and_none_is_empty():
    """However short its answers are: processes that share a target's layers run them together."""
    for length in range(1, 12):
        batch = collate([Sample([1, 2, *range(3, 3 + length)], 2)])
        whole = future_tokens(batch, 3)
        labels = future_tokens(batch, 3, least=5)
        segments = labels.segments(5)
        assert len(segments) == 5 and segments[0].start == 0
        assert all(columns.stop > columns.start for columns in segments)
        assert segments[-1].stop == labels.positions.shape[1] == max(5, length)
        assert torch.equal(labels.tokens[:, :length], whole.tokens)
        assert labels.next_tokens[:, length:].eq(NO_LABEL).all()
        assert labels.tokens[:, length:].eq(NO_LABEL).all()
