"""Masks: random trees against path membership, streams against their definition."""

import pytest
import torch
from tests.tiny import random_tree

from slipstream.core.masks import causal_mask, stream_mask, tree_mask
from slipstream.core.trees import Trees


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 20])
@pytest.mark.parametrize("slots", [0, 1, 5])
def test_tree_mask_is_membership_in_the_path(num_nodes, slots):
    for seed in range(3):
        tree = random_tree(num_nodes, torch.Generator().manual_seed(seed))
        ancestors = Trees.of([tree, tree]).ancestors
        for ends in (None, torch.tensor([slots, slots // 2])):
            mask = tree_mask(ancestors, slots, ends)
            assert mask.dtype == torch.bool and mask.shape == (2, 1, num_nodes, slots + num_nodes)
            for place, end in enumerate([slots, slots] if ends is None else ends.tolist()):
                for node in range(num_nodes):
                    seen = set(range(end)) | {slots + step for step in tree.path(node)}
                    assert set(mask[place, 0, node].nonzero().flatten().tolist()) == seen


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
