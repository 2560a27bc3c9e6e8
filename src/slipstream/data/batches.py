"""Batches of similar length under a token budget, in an order that can be resumed exactly.

An epoch's order depends on seed and epoch alone, so a loader that remembers epoch and position
goes on, bit for bit, where an interrupted run stopped. Data-parallel processes share every batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from slipstream.core.errors import InputError
from slipstream.core.processes import num_processes, process_rank
from slipstream.data.rendering import Sample

LENGTH_STEP = 16


@dataclass
class Batch:
    """Right-padded samples.

    ids: (B, T) token ids; lengths: (B,) true lengths; supervised: (B, T), True where the token is
    part of an answer (and so is predicted by the position before it).
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    supervised: torch.Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.ids.to(device), self.lengths.to(device), self.supervised.to(device))


def collate(samples: list[Sample]) -> Batch:
    """Right-pad `samples` into one batch; padding is known by length, never by its token (0)."""
    longest = max(padded_length(sample) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    supervised = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        for start, stop in sample.supervised:
            supervised[row, start:stop] = True
    lengths = torch.tensor([len(sample.ids) for sample in samples])
    return Batch(ids, lengths, supervised)


class TokenBatches:
    """An iterable of `Batch` whose padded size stays within `batch_tokens` tokens.

    Of n processes each gets every n-th row of batches that are n times as large. Raises
    `InputError` for fewer samples than processes.
    """

    def __init__(self, samples: list[Sample], batch_tokens: int, seed: int, shuffle: bool):
        self.samples, self.batch_tokens = samples, batch_tokens
        self.seed, self.shuffle = seed, shuffle
        self.epoch, self.position = -1, 0
        self._resuming = False

    def __len__(self) -> int:
        return len(self._order(0))

    def __iter__(self) -> Iterator[Batch]:
        """The next epoch, or the rest of the one whose state was loaded."""
        if not self._resuming or self.position >= len(self):
            self.epoch, self.position = self.epoch + 1, 0
        self._resuming = False
        order = self._order(self.epoch)
        while self.position < len(order):
            rows = order[self.position][process_rank() :: num_processes()]
            self.position += 1
            yield collate([self.samples[row] for row in rows])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self._resuming = True

    def _order(self, epoch: int) -> list[list[int]]:
        """Rows of each batch: neighbours in length share a batch, batches come in random order."""
        # Here and not in the constructor, which runs before the processes know of one another.
        if len(self.samples) < num_processes():
            raise InputError(
                f"data: {len(self.samples)} samples are not enough for {num_processes()} "
                "processes; give more, or set trainer.devices=1"
            )
        lengths = torch.tensor([padded_length(sample) for sample in self.samples])
        generator = torch.Generator().manual_seed(self.seed + (epoch if self.shuffle else 0))
        ranks = lengths.double()
        if self.shuffle:
            ranks += torch.rand(len(lengths), generator=generator, dtype=torch.float64)
        batches: list[list[int]] = [[]]
        room = self.batch_tokens * num_processes()
        for row in ranks.argsort(stable=True).tolist():
            full = (len(batches[-1]) + 1) * int(lengths[row]) > room
            if full and len(batches[-1]) >= num_processes():  # a row for every process
                batches.append([])
            batches[-1].append(row)
        if len(batches) > 1 and len(batches[-1]) < num_processes():
            batches[-2] += batches.pop()
        if self.shuffle:
            batches = [batches[i] for i in torch.randperm(len(batches), generator=generator)]
        return batches


def padded_length(sample: Sample) -> int:
    """The sample's length, rounded up so that batches come in few shapes (kernels are compiled
    for each)."""
    return -(-len(sample.ids) // LENGTH_STEP) * LENGTH_STEP
