"""Batches in an order that can be resumed exactly: samples of similar length under a token budget,
or rows of tensors.

An epoch's order depends on seed and epoch alone, so a loader that remembers epoch and position
goes on, bit for bit, where an interrupted run stopped.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from slipstream.core.errors import InputError
from slipstream.core.processes import num_processes, process_rank
from slipstream.data.rendering import Sample
from slipstream.speculators.base import Batch

LENGTH_STEP = 16


def collate(samples: list[Sample]) -> Batch:
    """Right-pad `samples` into one batch; padding is known by length, never by its token (0)."""
    ids = torch.zeros(len(samples), max(map(padded_length, samples)), dtype=torch.long)
    supervised = torch.zeros_like(ids, dtype=torch.bool)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        for start, stop in sample.supervised:
            supervised[row, start:stop] = True
    lengths = torch.tensor([len(sample.ids) for sample in samples])
    return Batch(ids, lengths, supervised)


class ResumableBatches(ABC):
    """An iterable of batches of rows, whose `state_dict` lets another one go on in its place.

    Every epoch has as many batches. Of n processes each gets every n-th row of a batch, and each
    batch has a row for every process. Raises `InputError` for fewer rows than processes.
    made_for: how many processes the batches are made for: those of the run's first start.
    """

    made_for: int | None = None

    def __init__(self, num_rows: int, seed: int, shuffle: bool):
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self.epoch, self.position = -1, 0
        self._resuming = False

    @abstractmethod
    def order(self, generator: torch.Generator, processes: int) -> list[list[int]]:
        """Rows of each batch of so many processes; `generator` shuffles this epoch's."""

    @abstractmethod
    def batch(self, rows: list[int]) -> object:
        """What these rows are together."""

    def __len__(self) -> int:
        return len(self._order(0))

    def __iter__(self) -> Iterator[object]:
        """The next epoch, or the rest of the one whose state was loaded."""
        if not self._resuming or self.position >= len(self):
            self.epoch, self.position = self.epoch + 1, 0
        self._resuming = False
        order = self._order(self.epoch)
        fewest = min(map(len, order))
        if fewest < num_processes():
            raise InputError(
                f"trainer.devices: a batch of the run that goes on has {fewest} samples, too few "
                f"for {num_processes()} processes; give at most {fewest}"
            )
        while self.position < len(order):
            rows = order[self.position][process_rank() :: num_processes()]
            self.position += 1
            yield self.batch(rows)

    def state_dict(self) -> dict[str, int]:
        """position: batches of this epoch that were given away."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self._resuming = True

    def _order(self, epoch: int) -> list[list[int]]:
        # Here and not in the constructor, which runs before the processes know of one another.
        if self.num_rows < num_processes():
            raise InputError(
                f"data: {self.num_rows} samples are not enough for {num_processes()} "
                "processes; give more, or set trainer.devices=1"
            )
        made_for = self.made_for or num_processes()
        generator = torch.Generator().manual_seed(self.seed + (epoch if self.shuffle else 0))
        batches = self.in_order(generator, made_for)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator)]

    def in_order(self, generator: torch.Generator, processes: int) -> list[list[int]]:
        """As `order`, and each batch has a row for every process."""
        batches = self.order(generator, processes)
        if len(batches) > 1 and len(batches[-1]) < processes:
            *batches, before, last = batches
            batches.append(before + last)
        return batches


class TokenBatches(ResumableBatches):
    """Batches of samples, each `Batch` of a padded size of up to `batch_tokens` tokens a process;
    neighbours in length share a batch, batches come in random order."""

    def __init__(self, samples: list[Sample], batch_tokens: int, seed: int, shuffle: bool):
        super().__init__(len(samples), seed, shuffle)
        self.samples, self.batch_tokens = samples, batch_tokens

    def batch(self, rows: list[int]) -> Batch:
        return collate([self.samples[row] for row in rows])

    def order(self, generator: torch.Generator, processes: int) -> list[list[int]]:
        lengths = torch.tensor(list(map(padded_length, self.samples)))
        ranks = lengths.double()
        if self.shuffle:
            ranks += torch.rand(len(lengths), generator=generator, dtype=torch.float64)
        batches: list[list[int]] = [[]]
        room = self.batch_tokens * processes
        for row in ranks.argsort(stable=True).tolist():
            full = (len(batches[-1]) + 1) * int(lengths[row]) > room
            if full and len(batches[-1]) >= processes:  # a row for every process
                batches.append([])
            batches[-1].append(row)
        return batches


class RowBatches(ResumableBatches):
    """Batches of `batch_size` rows a process of the same tensors, as lists of tensors."""

    def __init__(
        self, tensors: tuple[torch.Tensor, ...], batch_size: int, seed: int, shuffle: bool
    ):
        super().__init__(len(tensors[0]), seed, shuffle)
        self.tensors, self.batch_size = tensors, batch_size

    def batch(self, rows: list[int]) -> list[torch.Tensor]:
        return [tensor[rows] for tensor in self.tensors]

    def order(self, generator: torch.Generator, processes: int) -> list[list[int]]:
        rows = torch.randperm(self.num_rows, generator=generator)
        return [part.tolist() for part in rows.split(self.batch_size * processes)]


def padded_length(sample: Sample) -> int:
    """The sample's length, rounded up so that batches come in few shapes (kernels are compiled
    for each)."""
    return -(-len(sample.ids) // LENGTH_STEP) * LENGTH_STEP
