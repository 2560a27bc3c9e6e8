"""What every trained part is: a kind, settings, tensors, losses; and how a kind is found.

A speculator is one class in one file, with one YAML that names its `Config`. Kinds of other
packages are found through the entry-point group `slipstream.speculators` (kind = module:class); a
speculator's folder names its kind alone. Nothing here knows Lightning, drafters or data files.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import ClassVar, Self

import torch
from torch import nn

from slipstream.core.cache import TrainingCache
from slipstream.core.errors import InputError
from slipstream.core.settings import Settings
from slipstream.targets.rows import LayerVisitor, Rows
from slipstream.targets.target import Target

GROUP = "slipstream.speculators"
OWN_KINDS = {
    "streaming": "slipstream.speculators.streaming.speculator:StreamingSpeculator",
    "medusa": "slipstream.speculators.medusa:MedusaSpeculator",
    "sprinter": "slipstream.speculators.classifiers:SprinterVerifier",
    "acceptance": "slipstream.speculators.classifiers:AcceptanceHead",
}


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


@dataclass(frozen=True)
class SpeculatorConfig(Settings):
    """Settings of a kind; a YAML gives them, and so does a folder."""

    kind: ClassVar[str]
    section = "speculator"

    @classmethod
    def from_arguments(cls, arguments: dict) -> Self:
        """The config that `dataclasses.asdict` made `arguments` of (TypeError for others)."""
        lists = {name: tuple(each) for name, each in arguments.items() if isinstance(each, list)}
        return cls(**(arguments | lists))


class Speculator(nn.Module, ABC):
    """A trained part for one target: made as `Class(target, config)`, saved as a folder.

    title: what a reader is told it is. trained_length: of one that was opened, the tokens of the
    longest sample that it was trained on. Raises `InputError` for a config that the target cannot
    carry. Its tensors are finite floats, and no two are one; whole numbers of its config are no
    larger than the target's context or a side of a tensor (else its folder does not open). It is
    also made, and its losses are computed, of tensors without content, to estimate memory: no
    module is cast there, and no value is read.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    Config: ClassVar[type[SpeculatorConfig]]
    config: SpeculatorConfig
    trained_length: int | None = None


class DraftingSpeculator(Speculator):
    """A speculator that drafts for its target.

    source: from which paper, for the model card. drafter_class: its drafter, as an entry point
    names it (module:class), for drafters stand above speculators; made of a speculator alone it is
    that with which validation measures tau.
    """

    source: ClassVar[str]
    drafter_class: ClassVar[str]

    @abstractmethod
    def losses(
        self, target: Target, batch: Batch, seed: int | None = None, num_segments: int | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What is minimised, and the means to log by name ('loss', 'accuracy' and others).

        It runs the forwards that it needs. seed: of what is random and the same in all processes,
        of this batch alone, so that a resumed run draws the same; None in validation (torch's own
        generator is seeded, too, in each process with a seed of its own).
        num_segments: parts of a completion that are worked on one after the other, None for all at
        once.
        """

    def adapted(self, target: Target) -> Target:
        """The target whose forwards it is trained in: `target`, unless that learns with it."""
        return target

    def calibrate(self, target: Target, batches: Iterable[Batch]) -> None:
        """Measure on validation batches what drafting needs to know, and keep it in a buffer."""

    def drafter(self):
        """A drafter of this speculator as it is now."""
        return resolve_name(self.drafter_class)(self)

    def placed(self, target: Target) -> Self:
        """A copy on `target`'s device and in its dtype, in eval mode; this one, which may be in
        training, stays as it is."""
        config = target.model.config  # layers of the family keep it, to know how attention is made
        return copy.deepcopy(self, {id(config): config}).to(target.device, target.dtype).eval()


def known_kinds() -> dict[str, str]:
    """Where each kind is, as module:class; nothing is imported for it."""
    others = {point.name: point.value for point in entry_points(group=GROUP)}
    return others | OWN_KINDS


def speculator_class(kind: str) -> type[Speculator]:
    """`InputError` for a kind that is not installed."""
    known = known_kinds()
    if kind not in list(known):
        raise InputError(
            f"speculator: kind {kind!r} is not known; choose from {', '.join(known)}, or install "
            f"the package whose entry point {GROUP!r} names it"
        )
    return resolve_name(known[kind])


def new_speculator(target: Target, config: SpeculatorConfig) -> Speculator:
    """An untrained speculator for `target`, of the kind that `config` belongs to."""
    return speculator_class(config.kind)(target, config)


def causal_rows(
    target: Target,
    ids: torch.Tensor,
    cache: TrainingCache | None = None,
    visitors: Sequence[LayerVisitor] = (),
) -> Rows:
    """All rows of (B, T) samples through the whole target, each seeing those before it."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return target.forward(ids, positions, None, cache, visitors)
