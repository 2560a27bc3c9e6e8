"""Masks: random trees against path membership, streams against their definition."""

import pytest
import torch
from tests.tiny import random_tree

from slipstream.core.masks import causal_mask, stream_mask, tree_mask


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 20])
@pytest.mark.parametrize("committed", [0, 1, 5])
def test_tree_mask_is_membership_in_the_path(num_nodes, committed):
    for seed in range(3):
        tree = random_tree(num_nodes, torch.Generator().manual_seed(seed))
        (mask,) = tree_mask([committed], tree.ancestor_mask()[None])[0]
        assert mask.dtype == torch.bool and mask.shape == (num_nodes, committed + num_nodes)
        for node in range(num_nodes):
            seen = set(range(committed)) | {committed + step for step in tree.path(node)}
            assert set(mask[node].nonzero().flatten().tolist()) == seen


def test_causal_mask_is_the_mask_of_a_chain():
    for length in (1, 2, 6):
        rows = [[column <= row for column in range(length)] for row in range(length)]
        assert causal_mask(length).tolist() == rows


@pytest.mark.parametrize("shape", [(1, 3), (4, 6), (2, 3, 5), (2, 1, 3, 3)])
@pytest.mark.parametrize("num_streams", [1, 2, 4])
def test_stream_mask_is_its_definition(shape, num_streams):
    generator = torch.Generator().manual_seed(num_streams)
    main = torch.rand(shape, generator=generator) < 0.5
    *batch, positions, slots = shape
    expected = torch.zeros(
        *batch, positions * num_streams, slots + positions * num_streams, dtype=torch.bool
    )
    for position in range(positions):
        for stream in range(num_streams):
            row = position * num_streams + stream
            expected[..., row, :slots] = main[..., position, :]
            for earlier in range(stream + 1):
                expected[..., row, slots + position * num_streams + earlier] = True
    mask = stream_mask(main, num_streams)
    assert mask.dtype == torch.bool and torch.equal(mask, expected)
