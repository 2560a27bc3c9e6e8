"""What the keys of train.py may be."""

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Annotated, ClassVar, Literal

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger

from slipstream.configuration import Command
from slipstream.core.settings import (
    MOST,
    NARROWED,
    Amount,
    Count,
    Ge,
    Le,
    NotNegative,
    PositiveShare,
    Seed,
    Share,
    Text,
)
from slipstream.data.prompt_completion import PromptCompletionData
from slipstream.speculators.base import SpeculatorConfig
from slipstream.targets.target import Target
from slipstream.training.module import TrainingModule

FromMinus1 = Annotated[int, Ge(-1), Le(MOST)]
NARROWED[L.Trainer] = {
    "precision": signature(L.Trainer).parameters["precision"].annotation | Literal["auto"],
    "devices": FromMinus1 | Text | list[Amount],
    "max_epochs": Count | Literal[-1] | None,
    "max_steps": Count | Literal[-1],
    "min_epochs": Amount | None,
    "min_steps": Amount | None,
    "max_time": Text | dict | None,
    "val_check_interval": Count | PositiveShare | None,
    "check_val_every_n_epoch": Count | None,
    "limit_train_batches": Count | PositiveShare | None,
    "limit_val_batches": Amount | Share | None,
    "num_sanity_val_steps": FromMinus1 | None,
    "accumulate_grad_batches": Count,
    "gradient_clip_val": NotNegative | None,
    "log_every_n_steps": Amount | None,
}
NARROWED[ModelCheckpoint] = {"mode": Literal["min", "max"], "save_top_k": FromMinus1}
NARROWED[EarlyStopping] = {"mode": Literal["min", "max"], "patience": Amount}


@dataclass(kw_only=True)
class Train(Command):
    """Of conf/train.yaml."""

    given: ClassVar[Mapping] = {"training": ("target", "speculator")}
    draft: Text = ""
    seed: Seed
    check: bool
    resume: Text | None
    output_dir: Text
    target: Target | None
    speculator: SpeculatorConfig | None = None
    data: PromptCompletionData
    training: TrainingModule
    trainer: L.Trainer
    logger: dict[str, Logger | None] | None
    callbacks: dict[str, L.Callback | None] | None
