"""StepCache: random steps against plain lists, layers with different rows, errors."""

from random import Random

import pytest
import torch

from slipstream.core.cache import StepCache, TrainingCache

HEADS, SIZE, CAPACITY = 2, 3, 24
CPU = [torch.device("cpu")]


class PlainCache:
    """The reference: one Python list of rows per layer, committed and staged."""

    def __init__(self, num_layers: int):
        self.committed: list[list[tuple]] = [[] for _ in range(num_layers)]
        self.staged: list[list[tuple]] = [[] for _ in range(num_layers)]

    def stage(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.staged[layer] += list(zip(keys.unbind(-2), values.unbind(-2), strict=True))

    def all_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = zip(*(self.committed[layer] + self.staged[layer]), strict=True)
        return torch.stack(keys, -2), torch.stack(values, -2)

    def commit(self, groups: list[tuple[range, list[int]]]) -> None:
        for layers, rows in groups:
            for layer in layers:
                self.committed[layer] += [self.staged[layer][row] for row in rows]
        self.forget_staged()

    def forget_staged(self) -> None:
        self.staged = [[] for _ in self.staged]

    def roll_back(self, length: int) -> None:
        self.committed = [rows[:length] for rows in self.committed]
        self.forget_staged()

    @property
    def length(self) -> int:
        return len(self.committed[0])


def stage(cache: StepCache, plain: PlainCache, layer: int, count: int, batch: int = 1) -> None:
    """Stage random rows in both; what `update` hands back must be all rows so far."""
    keys, values = torch.randn(2, batch, HEADS, count, SIZE)
    plain.stage(layer, keys, values)
    seen = cache.update(keys, values, layer)
    for ours, theirs in zip(seen, plain.all_rows(layer), strict=True):
        assert torch.equal(ours, theirs)


def commit(cache: StepCache, groups: list[tuple[range, list[int]]]) -> None:
    """Keep these rows of layers before and after one, the same of all sequences."""
    batch = len(cache.lengths)
    (below, first), (_, second) = groups if len(groups) == 2 else (groups[0], groups[0])
    rows, under = (torch.tensor([own]).long().expand(batch, -1) for own in (second, first))
    layer = below.stop if len(groups) == 2 else None
    counts = torch.full((batch,), len(second))
    cache.commit(rows, counts, None if layer is None else (layer, under))
    cache.learn([length + len(second) for length in cache.lengths])
    assert cache.ends.tolist() == cache.lengths


def assert_equal(cache: StepCache, plain: PlainCache) -> None:
    """Committed rows of all layers are the same."""
    assert cache.bound == plain.length
    for layer in range(len(plain.committed)):
        assert cache.staged[layer] == len(plain.staged[layer])
        if plain.length:
            ours = [part[..., : plain.length, :] for part in cache.layers[layer]]
            theirs = plain.all_rows(layer)
            assert torch.equal(ours[0], theirs[0][..., : plain.length, :])
            assert torch.equal(ours[1], theirs[1][..., : plain.length, :])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("batch", [1, 2])
def test_random_steps_agree_with_plain_lists(seed, batch):
    random = Random(seed)
    torch.manual_seed(seed)
    devices = [torch.device(name) for name in ("cpu", "cpu:0", "cpu:0", "cpu")]
    cache = StepCache(devices if seed % 2 else CPU * 4, HEADS, SIZE, CAPACITY, batch)
    plain = PlainCache(4)
    commits = moved = 0
    for _ in range(60):
        action = random.choice(["step", "step", "step", "forget", "roll_back"])
        room = CAPACITY - cache.bound
        if action == "roll_back" or room < 4:
            length = random.randint(0, cache.bound)
            cache.settle([length] * batch)
            plain.roll_back(length)
        else:
            split = random.randint(1, 3)
            groups = [range(split), range(split, 4)]
            counts = [random.randint(1, min(room, 7)) for _ in groups]
            for layers, count in zip(groups, counts, strict=True):
                first = random.randint(1, count)
                for layer in layers:
                    stage(cache, plain, layer, first, batch)
                    if count > first:
                        stage(cache, plain, layer, count - first, batch)
            if action == "forget":
                cache.forget_staged()
                plain.forget_staged()
            else:
                kept = random.randint(1, min(counts))
                chosen = [
                    (layers, [0, *random.sample(range(1, count), kept - 1)])
                    for layers, count in zip(groups, counts, strict=True)
                ]
                commit(cache, chosen)
                plain.commit(chosen)
                commits += 1
                moved += any(rows != list(range(kept)) for _, rows in chosen)
        assert_equal(cache, plain)
    assert commits > 10 and moved > 5


def test_streams_in_the_upper_layers_leave_no_trace():
    torch.manual_seed(0)
    cache, plain = StepCache(CPU * 3, HEADS, SIZE, CAPACITY), PlainCache(3)
    for layer in range(3):
        stage(cache, plain, layer, 5)
    stage(cache, plain, 2, 8)
    assert cache.staged == [5, 5, 13]
    groups = [(range(1), [0, 2, 4]), (range(1, 3), [0, 1, 3])]
    commit(cache, groups)
    plain.commit(groups)
    for layer in range(3):
        stage(cache, plain, layer, 2)
    assert_equal(cache, plain)
    assert cache.staged == [2, 2, 2]


def test_rows_beyond_the_capacity_are_refused_and_change_nothing():
    torch.manual_seed(0)
    cache, plain = StepCache(CPU * 2, HEADS, SIZE, capacity=4), PlainCache(2)
    for layer in range(2):
        stage(cache, plain, layer, 3)
    cache.commit_first([3])
    plain.commit([(range(2), [0, 1, 2])])
    with pytest.raises(ValueError, match="4 rows"):
        cache.update(*torch.randn(2, 1, HEADS, 2, SIZE), 1)
    assert cache.staged == [0, 0]
    for layer in range(2):
        stage(cache, plain, layer, 1)
    with pytest.raises(ValueError, match="4 rows"):
        cache.update(*torch.randn(2, 1, HEADS, 1, SIZE), 0)
    cache.commit_first([1])
    plain.commit([(range(2), [0])])
    assert_equal(cache, plain)


def test_what_is_staged_is_forgotten_where_the_host_says_how_much_is_committed():
    cache = StepCache(CPU, HEADS, SIZE, CAPACITY)
    cache.update(*torch.randn(2, 1, HEADS, 3, SIZE), 0)
    cache.commit_first([2])
    cache.update(*torch.randn(2, 1, HEADS, 3, SIZE), 0)
    cache.settle([2])
    assert cache.bound == 2 and cache.staged == [0]


def test_finished_sequences_leave_and_the_others_go_on():
    torch.manual_seed(0)
    cache = StepCache(CPU * 2, HEADS, SIZE, CAPACITY, batch_size=3)
    rows = torch.randn(2, 2, 3, HEADS, 4, SIZE)
    for layer in range(2):
        cache.update(rows[layer, 0], rows[layer, 1], layer)
    cache.commit_first([4] * 3)
    cache.keep_sequences([0, 2])
    more = torch.randn(2, 2, 2, HEADS, 1, SIZE)
    for layer in range(2):
        keys, values = cache.update(more[layer, 0], more[layer, 1], layer)
        assert torch.equal(keys, torch.cat([rows[layer, 0, [0, 2]], more[layer, 0]], -2))
        assert torch.equal(values, torch.cat([rows[layer, 1, [0, 2]], more[layer, 1]], -2))


def rows_of(cache: StepCache, sequence: int) -> list[float]:
    """What is committed of one sequence in the first layer; rows hold one number."""
    return cache.layers[0][0][sequence, 0, : cache.lengths[sequence], 0].tolist()


def staged(cache: StepCache, numbers: list[list[float]]) -> None:
    rows = torch.tensor(numbers)[:, None, :, None].expand(-1, HEADS, -1, SIZE)
    for layer in range(len(cache.layers)):
        cache.update(rows, rows, layer)


@pytest.mark.parametrize("granularity", [1, 4])
def test_sequences_keep_rows_of_their_own_at_lengths_of_their_own(granularity):
    cache = StepCache(CPU * 2, HEADS, SIZE, CAPACITY, batch_size=2, granularity=granularity)
    staged(cache, [[1, 2, 3], [4, 5, 0]])
    cache.commit_first([3, 2])
    assert cache.slots % granularity == 0 and not cache.level
    staged(cache, [[6, 7, 8, 9], [10, 11, 12, 13]])
    cache.commit(torch.tensor([[0, 2, 3], [0, 3, 0]]), torch.tensor([3, 2]))
    assert cache.bound >= 6 and cache.ends.tolist() == [6, 4]
    staged(cache, [[99.0], [99.0]])  # before the host knows: it must lie beyond
    cache.forget_staged()
    cache.learn([6, 4])
    assert rows_of(cache, 0) == [1, 2, 3, 6, 8, 9] and rows_of(cache, 1) == [4, 5, 10, 13]


def test_a_cache_takes_in_the_sequences_of_others():
    one, other = (StepCache(CPU * 2, HEADS, SIZE, CAPACITY, batch_size=size) for size in (2, 1))
    staged(one, [[1, 2, 3], [4, 5, 6]])
    one.commit_first([3, 1])
    staged(other, [[7, 8]])
    other.commit_first([2])
    both = StepCache(CPU * 2, HEADS, SIZE, CAPACITY, batch_size=3)
    both.take_in(one, other)
    assert [rows_of(both, place) for place in range(3)] == [[1, 2, 3], [4], [7, 8]]
    assert both.ends.tolist() == both.lengths == [3, 1, 2]
    assert not one.fits(other) and not both.fits(other)
    both.keep_sequences([0, 2])  # one leaves, and its place is another's
    address = both.layers[1][0].data_ptr()
    assert both.fits(other)
    both.take_in(both, other)
    assert [rows_of(both, place) for place in range(3)] == [[1, 2, 3], [7, 8], [7, 8]]
    assert both.layers[1][0].data_ptr() == address and both.ends.tolist() == [3, 2, 2]
    empty = both.emptied(1)
    staged(empty, [[5.0]])
    empty.commit_first([1])
    assert rows_of(empty, 0) == [5] and both.layers[1][0].data_ptr() == address


def test_room_counts_what_rounding_may_take():
    """Rows are staged behind a multiple of the granularity."""
    cache = StepCache(CPU, HEADS, SIZE, CAPACITY, batch_size=2, granularity=8, spare=8)
    assert cache.room == CAPACITY - 8
    cache.check_room(cache.room)  # of an empty one
    cache.settle([9, 3])
    cache.check_room(cache.room - 9)
    small, large = (StepCache(CPU, HEADS, SIZE, size) for size in (CAPACITY - 8, CAPACITY - 7))
    cache.settle([9])
    assert cache.fits(small) and not cache.fits(large)


def test_the_buffer_is_never_allocated_again():
    cache = StepCache(CPU * 2, HEADS, SIZE, CAPACITY)
    address = cache.layers[0][0].data_ptr()
    for _ in range(3):
        for layer in range(2):
            keys, _ = cache.update(*torch.randn(2, 1, HEADS, 5, SIZE), layer)
            assert keys.data_ptr() == cache.layers[layer][0].data_ptr()
        commit(cache, [(range(2), [0, 3, 4])])
    assert cache.layers[0][0].data_ptr() == address and cache.bound == 9


def test_the_training_cache_shows_later_rows_what_was_kept_and_themselves():
    torch.manual_seed(0)
    cache = TrainingCache(2)
    first, second, third = torch.randn(3, 2, 2, HEADS, 4, SIZE)
    assert cache.slots == 0
    for _ in range(2):  # computed again, it sees the same
        assert torch.equal(cache.update(*first, 1)[0], first[0])
    cache.settle()
    cache.keep = 0
    for later in (second, third):
        keys, values = cache.update(*later, 1)
        assert torch.equal(keys, torch.cat([first[0], later[0]], -2))
        assert torch.equal(values, torch.cat([first[1], later[1]], -2))
    cache.visible = 3
    keys, _ = cache.update(*second, 1)
    assert torch.equal(keys, torch.cat([first[0][..., :3, :], second[0]], -2))
    assert cache.slots == 4 and cache.kept[0] is None


def test_layers_before_the_first_keep_nothing_for_later_rows():
    cache = TrainingCache(3, first=1)
    for layer in range(3):
        cache.update(*torch.randn(2, 1, HEADS, 4, SIZE), layer)
    cache.settle()
    assert [kept and kept[0].shape[-2] for kept in cache.kept] == [None, 4, 4]
