"""StepCache: keys and values in buffers that are allocated once, one for each device.

A forward *stages* its rows behind the committed ones; after verification `commit` moves the rows of
the accepted path into place and forgets the others. Layers may stage different rows within a step
(pruned nodes stay behind in the lower layers, streams exist in the upper ones only).

Attention layers call `update(key, value, layer_idx)` of it, as of transformers' own caches.
"""

import copy
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from slipstream.core.transfer import on_device


class StepCache:
    """Keys and values of L layers for B sequences, each of its own length.

    devices: the device of each layer; batch_size: the most sequences (some may leave, others join).
    `layers`: the (keys, values) of each layer, each (batch_size, H_kv, capacity, D_head), views of
    buffers that adjacent layers on one device share and that never move. `ends`: (B,), how many
    slots of each sequence are committed; `lengths`: the same on the host; between a `commit` and
    `learn` they are out of date, and the host knows only that no sequence goes beyond `bound`.
    In all sequences rows are staged from slot `slots` on: `bound` rounded up to a multiple of
    `granularity`, so that steps of compiled layers have few shapes. With a granularity above 1 an
    empty cache counts as one slot, so that prompts are steps like others. The slots between a
    sequence's end and `slots` belong to nothing. spare: slots of the capacity that are for
    such gaps, and for padding.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        num_heads: int,
        head_size: int,
        capacity: int,
        batch_size: int = 1,
        dtype: torch.dtype = torch.float32,
        granularity: int = 1,
        spare: int = 0,
    ):
        shape = 2, batch_size, num_heads, capacity, head_size
        # Zeros, not whatever lies in memory: masked slots count 0 times what they hold, and 0 times
        # infinity is no number.
        self._buffers = [
            torch.zeros(len(list(layers)), *shape, dtype=dtype, device=device)
            for device, layers in groupby(devices)
        ]
        self.layers = [(layer[0], layer[1]) for buffer in self._buffers for layer in buffer]
        self.batch_size, self.capacity, self.granularity = batch_size, capacity, granularity
        self.spare = spare
        self.settle([0] * batch_size)

    def settle(self, lengths: list[int]) -> None:
        """Set how many slots of each sequence are committed, and drop every staged row."""
        self.learn(lengths)
        self.ends = on_device(self.lengths, self._buffers[0].device)
        self.forget_staged()

    def learn(self, lengths: list[int]) -> None:
        """The host learns of the lengths that the last commit has led to."""
        self.lengths, self.bound = list(lengths), max(lengths, default=0)

    @property
    def slots(self) -> int:
        bound = max(self.bound, int(self.granularity > 1))
        return -(-bound // self.granularity) * self.granularity

    @property
    def level(self) -> bool:
        """Whether all sequences are committed up to the staged rows, as far as the host knows."""
        return self.bound == self.slots == min(self.lengths)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def room(self) -> int:
        """How many rows of a sequence fit, wherever the staged ones come to lie."""
        return self.capacity - self.spare

    def fits(self, other: "StepCache") -> bool:
        """Whether the sequences of `other` have room after its own."""
        together = len(self.lengths) + len(other.lengths)
        return other.room <= self.room and together <= self.batch_size

    def _within(self, layers: range) -> Iterator[torch.Tensor]:
        """The parts of the buffers that hold these layers of the sequences."""
        first = 0
        for buffer in self._buffers:
            start, stop = max(layers.start - first, 0), max(layers.stop - first, 0)
            if start < min(stop, len(buffer)):
                yield buffer[start:stop, :, : len(self.lengths)]
            first += len(buffer)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_, **__
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stage rows of one layer, behind those already staged there in this step.

        key, value: (B, H_kv, R, D_head). Returns views of all slots up to the staged ones,
        (B, H_kv, slots + staged, D_head). Raises ValueError when the capacity is exceeded.
        """
        before, count = self.staged[layer_idx], key.shape[-2]
        start = self.slots + before
        self.check_room(before + count)
        self.staged[layer_idx] += count
        keys, values = self.layers[layer_idx]
        if key.shape[0] < self.batch_size:
            keys, values = keys[: key.shape[0]], values[: key.shape[0]]
        keys.narrow(-2, start, count).copy_(key)
        values.narrow(-2, start, count).copy_(value)
        return keys.narrow(-2, 0, start + count), values.narrow(-2, 0, start + count)

    def check_room(self, rows: int) -> None:
        """Raise ValueError where the capacity does not hold so many staged rows."""
        if self.slots + rows > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} rows and cannot stage row {self.slots + rows}"
            )

    @torch.inference_mode()
    def copied(self) -> "StepCache":
        """The same sequences in buffers of their own."""
        cache, count = copy.copy(self), len(self.lengths)
        cache._buffers = [buffer[:, :, :count].clone() for buffer in self._buffers]
        cache.layers = [(layer[0], layer[1]) for buffer in cache._buffers for layer in buffer]
        cache.batch_size = count
        return cache

    @torch.inference_mode()
    def clear(self, batch_size: int) -> None:
        """Let the slots of so many sequences hold zeros again."""
        for buffer in self._buffers:
            buffer[:, :, :batch_size].zero_()

    def emptied(self, batch_size: int) -> "StepCache":
        """An empty cache of so many sequences over the same buffers."""
        cache = copy.copy(self)
        cache.settle([0] * batch_size)
        return cache

    def commit(
        self,
        rows: torch.Tensor,
        counts: torch.Tensor,
        below: tuple[int, torch.Tensor] | None = None,
    ) -> None:
        """Keep some staged rows of each sequence, in order, and forget the rest; does not wait.

        rows: (B, P) indices of staged rows, the first one 0, any index as padding; counts: (B,),
        how many of them are kept; below: a layer, and other indices for the layers before it.

        Example: 10 and 7 committed, 4 rows staged: rows [[0, 2], [0, 3]] and counts [2, 1] leave 12
        and 8 committed, row 2 in slot 11 of the first, row 0 in slot 7 of the second.
        """
        layer, lower = below or (0, rows)
        if layer:
            self._move(range(layer), lower)
        self._move(range(layer, len(self.layers)), rows)
        self.ends = self.ends + counts
        self.bound += rows.shape[1]
        self.forget_staged()

    def _move(self, layers: range, rows: torch.Tensor) -> None:
        """Move staged rows to behind the committed ones; padding ends up beyond their new end."""
        first = 1 if self.level else 0  # the first row is in its place already
        rows = rows[:, first:]
        if not rows.shape[1]:
            return
        places = torch.arange(first, first + rows.shape[1], device=rows.device)
        source, place = rows + self.slots, self.ends[:, None] + places
        for part in self._within(layers):
            if len(rows) == 1:
                moved = part.index_select(-2, source[0].to(part.device))
                part.index_copy_(-2, place[0].to(part.device), moved)
            else:
                each = torch.arange(len(rows), device=part.device)[:, None]
                from_, to = source.to(part.device), place.to(part.device)
                # Indexed on both sides of the heads: (B, P, L, 2, H_kv, D_head), a copy.
                part[:, :, each, :, to] = part[:, :, each, :, from_]

    def commit_first(self, counts: list[int]) -> None:
        """Keep the first so many staged rows of each sequence, as the host says."""
        lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if not self.level:
            device = self._buffers[0].device
            rows = torch.arange(max(counts), device=device).expand(len(counts), -1)
            self._move(range(len(self.staged)), rows)
        self.settle(lengths)

    @torch.inference_mode()
    def keep_sequences(self, sequences: list[int]) -> None:
        """Let only these of the B sequences go on (ascending)."""
        lengths = [self.lengths[sequence] for sequence in sequences]
        slots = max(lengths, default=0)
        for buffer in self._buffers:
            for place, sequence in enumerate(sequences):
                if place != sequence:
                    buffer[:, :, place, :, :slots] = buffer[:, :, sequence, :, :slots]
        self.settle(lengths)

    def take_in(self, *others: "StepCache") -> None:
        """Copy the sequences of `others`, one cache after the other, in place of its own; the first
        of them may be itself."""
        first = 0
        for other in others:
            count, slots = len(other.lengths), other.bound
            if other is not self:
                for own, given in zip(self._buffers, other._buffers, strict=True):
                    own[:, :, first : first + count, :, :slots] = given[:, :, :count, :, :slots]
            first += count
        self.settle([length for other in others for length in other.lengths])

    def forget_staged(self) -> None:
        """Drop every staged row."""
        self.staged = [0] * len(self.layers)


class TrainingCache:
    """The plain counterpart of `StepCache` with gradients, and its reference: rows attend to the
    kept rows of their layer and to one another.

    kept: (keys, values) of each layer, None for none; made: those of the forward that runs, which
    `settle` turns into `kept`, so that a layer that is recomputed sees what it saw. keep: how many
    rows of a call go into `made`, the first ones (None for all; none in layers before `first`);
    visible: how many of the kept rows later rows may attend to, the first ones (None for all).
    Streams come after the main rows of a call and are never kept.
    """

    def __init__(self, num_layers: int, first: int = 0):
        self.keep: int | None = None
        self.visible: int | None = None
        self.first = first
        self.kept: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self.made = list(self.kept)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_, **__
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key, value: (B, H_kv, R, D_head); returns what these rows may attend to."""
        own, kept = (key, value), self.kept[layer_idx]
        count = key.shape[-2] if self.keep is None else self.keep
        if count and layer_idx >= self.first:
            self.made[layer_idx] = key[..., :count, :], value[..., :count, :]
        if kept is None:
            return own
        pairs = zip(kept, own, strict=True)
        keys, values = (torch.cat([old[..., : self.visible, :], new], -2) for old, new in pairs)
        return keys, values

    def settle(self) -> None:
        """The forward has ended: what it made is kept."""
        self.kept = list(self.made)

    @property
    def slots(self) -> int:
        """Slots that ended forwards have kept."""
        kept = self.kept[-1]
        return 0 if kept is None else kept[0].shape[-2]
