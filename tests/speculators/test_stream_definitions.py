"""What rows see and what rotation does, against their definitions written out as loops."""

import cmath
from itertools import product

import pytest
import torch
from tests.tiny import ARCHITECTURES, tiny_target

from slipstream.core.masks import own_streams
from slipstream.speculators.streaming.adapters import rotate, rotating
from slipstream.targets.attention import limit_streams
from slipstream.targets.rows import Rows

BATCH, HEADS, KEY_HEADS, SIZE = 2, 4, 2, 6
OWNERS = [
    [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]],
    [[4, 0, -1], [2, -1, 3]],
    [[3], [3]],
]


@pytest.mark.parametrize("owners", OWNERS)
@pytest.mark.parametrize("num_streams", [1, 2, 4])
def test_a_main_row_sees_the_streams_it_owns(owners, num_streams):
    num_rows, width = 5, len(owners[0]) * num_streams
    mask = own_streams(torch.tensor(owners), num_rows, num_streams)
    assert mask.dtype == torch.bool and mask.shape == (BATCH, num_rows, width)
    for sequence, row, column in product(range(BATCH), range(num_rows), range(width)):
        owner = owners[sequence][column // num_streams]
        assert bool(mask[sequence, row, column]) == (owner == row)


@pytest.mark.parametrize("owners", OWNERS)
@pytest.mark.parametrize("num_streams", [1, 3])
@pytest.mark.parametrize("attended", [1, 2, 5, 50])
def test_streams_see_what_their_main_row_scores_highest(owners, num_streams, attended):
    """Per head, among what the main row sees; the rest of every line stays as it was."""
    generator = torch.Generator().manual_seed(attended)
    nodes, committed = 5, 4
    num_stream_rows, main = len(owners[0]) * num_streams, committed + nodes
    count = nodes + num_stream_rows
    mask = torch.rand(BATCH, 1, count, committed + count, generator=generator) < 0.7
    for sequence, row in product(range(BATCH), range(nodes, count)):
        owner = owners[sequence][(row - nodes) // num_streams]
        mask[sequence, 0, row, :main] = mask[sequence, 0, owner, :main]
    query = torch.randn(BATCH, HEADS, count, SIZE, generator=generator)
    key = torch.randn(BATCH, KEY_HEADS, committed + count, SIZE, generator=generator)
    rows = Rows(torch.empty(BATCH, count, 1), None, mask, num_stream_rows, torch.tensor(owners))
    found = limit_streams(mask, query, key, rows, attended)
    assert found.shape == (BATCH, HEADS, count, committed + count)
    removed = 0
    for sequence, head, row in product(range(BATCH), range(HEADS), range(count)):
        expected, owner = mask[sequence, 0, row].tolist(), 0
        if row >= nodes:
            owner = owners[sequence][(row - nodes) // num_streams]
            asking, keys = query[sequence, head, owner], key[sequence, head // 2]
            scores = {slot: float(asking @ keys[slot]) for slot in range(main) if expected[slot]}
            for slot in sorted(scores, key=scores.get)[: max(0, len(scores) - attended)]:
                expected[slot] = False
                removed += 1
        if owner >= 0:
            assert found[sequence, head, row].tolist() == expected
    assert bool(removed) == (attended < main)


@pytest.mark.parametrize("num_streams", [1, 2, 3])
def test_rotation_multiplies_by_a_power_of_e(num_streams):
    """Eq. 8, the halves of a head as real and imaginary part."""
    positions, step = 3, 0.25
    values = torch.randn(BATCH, positions * num_streams, KEY_HEADS, SIZE, dtype=torch.float64)
    turned = rotate(values, num_streams, step)
    assert turned.shape == values.shape
    for sequence, row in product(range(BATCH), range(positions * num_streams)):
        factor = cmath.exp(1j * step * (row % num_streams + 1))
        for head, real in product(range(KEY_HEADS), range(SIZE // 2)):
            before, after = (
                values[sequence, row, head].tolist(),
                turned[sequence, row, head].tolist(),
            )
            imaginary = real + SIZE // 2
            expected = complex(before[real], before[imaginary]) * factor
            assert complex(after[real], after[imaginary]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_rotation_is_of_the_values_of_stream_rows_alone(architecture):
    """In the layers given, and only within; some have queries and keys in the same linear."""
    target = tiny_target(architecture)
    nodes, num_streams, values_of = 4, 3, target.family.values_of
    hidden = torch.randn(1, nodes + 2 * num_streams, target.hidden_size, dtype=torch.float64)
    rows = Rows(hidden, None, None, 2 * num_streams)
    layers = target.family.layers

    def outputs() -> list[torch.Tensor]:
        linears = [layer.get_submodule(target.family.value_linear) for layer in layers]
        return [linear(hidden) for linear in linears]

    plain = outputs()
    with rotating(target, layers[2:], rows, num_streams, 0.3):
        within = outputs()
    assert all(map(torch.equal, plain, outputs()))
    assert all(map(torch.equal, plain[:2], within[:2]))
    for before, after in zip(plain[2:], within[2:], strict=True):
        expected = before.clone()
        streams = values_of(expected)[:, nodes:]
        streams.copy_(rotate(streams, num_streams, 0.3))
        assert torch.equal(after, expected)
        assert (streams - values_of(before)[:, nodes:]).abs().max() > 0.1


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_values_of_a_linear_are_what_is_cached(architecture):
    target = tiny_target(architecture)
    computed, cache = [], target.new_cache(4)
    for layer in target.family.layers:
        linear = layer.get_submodule(target.family.value_linear)
        linear.register_forward_hook(lambda _, __, output: computed.append(output))
    target.forward(torch.tensor([[3, 7, 5]]), torch.arange(3)[None], None, cache)
    for layer, output in enumerate(computed):
        values = target.family.values_of(output).transpose(1, 2)
        assert torch.equal(cache.layers[layer][1][:, :, :3], values)
