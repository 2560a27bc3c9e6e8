"""Batches of about as many tokens each, and a row for every process in all of them."""

import pytest
import torch

from slipstream.core.errors import InputError
from slipstream.data import batches
from slipstream.data.batches import TokenBatches
from slipstream.data.rendering import Sample


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("processes", "lengths"),
    [
        (1, [3, 200, 7, 90, 300, 12, 150, 5, 250, 400]),
        (3, [3, 200, 7, 90, 300, 12, 150, 5, 250, 400]),
        (2, [10, 11, 150, 151, 300]),
        (2, [10, 11, 300]),
    ],
)
def test_every_process_has_rows_in_every_batch(monkeypatch, processes, lengths, shuffle):
    """Each sample once: also where one is longer than a batch is to be, and where too few are left
    for a last batch of their own."""
    samples = [Sample(list(range(length)), 1) for length in lengths]
    monkeypatch.setattr(batches, "num_processes", lambda: processes)
    found = []
    for rank in range(processes):
        monkeypatch.setattr(batches, "process_rank", lambda rank=rank: rank)
        found.append(list(TokenBatches(samples, 128, seed=0, shuffle=shuffle)))
    assert len({len(own) for own in found}) == 1
    seen = torch.cat([batch.lengths for own in found for batch in own])
    assert sorted(seen.tolist()) == sorted(lengths)


def test_fewer_samples_than_processes_are_one_sentence(monkeypatch):
    """Also where the processes met only after the batches were made, as Lightning's do."""
    found = TokenBatches([Sample([1, 2], 1)] * 2, 128, seed=0, shuffle=False)
    monkeypatch.setattr(batches, "num_processes", lambda: 3)
    for read in (list, len):
        with pytest.raises(InputError, match="2 samples are not enough for 3 processes"):
            read(found)


def test_validation_begins_with_batches_of_all_lengths_always_the_same():
    """A few of the first batches are validated on."""
    samples = [Sample([0] * length, 1) for length in range(10, 500, 5)]
    found = TokenBatches(samples, 512, seed=0, shuffle=False)
    first, again = ([batch.lengths for batch in found] for _ in range(2))
    assert [own.tolist() for own in first] == [own.tolist() for own in again]
    assert torch.cat(first[:4]).float().mean() > 200  # of the shortest: 25
