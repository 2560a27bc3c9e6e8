"""What all Lightning modules here share: checks, optimiser, schedule, log, what checkpoints hold.

The learning rate rises linearly over the warm-up, half of the steps at most, and then falls
linearly to zero.
"""

import math
import time
from functools import partial
from pathlib import Path

import lightning as L
import torch
from torch.optim.lr_scheduler import LambdaLR

from slipstream.core.errors import InputError
from slipstream.core.files import key_of
from slipstream.core.processes import mean_over_processes, num_processes, process_rank
from slipstream.core.resuming import check_same
from slipstream.data.prompt_completion import PromptCompletionData
from slipstream.targets.target import Target
from slipstream.training.memory import Step


class TrainingModule(L.LightningModule):
    """`losses` of batches, minimised by AdamW.

    title, description: of the model card. checkpointed: checkpoints hold the tensors whose names
    contain it, and nothing of a frozen target.
    """

    title: str
    description = "Trained by Slipstream, next-token loss on completions."
    checkpointed = ""
    runs_target = True  # in steps, whose numbers must go with the target's
    beside = 0  # bytes of models that are no part of the module, and on its device, too
    betas = (0.9, 0.999)

    def __init__(self, learning_rate: float, weight_decay: float = 0.0, warmup_steps: int = 0):
        super().__init__()
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps = warmup_steps
        self.strict_loading = not self.checkpointed
        self.data: PromptCompletionData | None = None
        self.run: dict[str, object] = {}  # what it is a run of: `resuming.identity`
        self._before, self._started = 0.0, time.perf_counter()

    def prepare(self, data: PromptCompletionData) -> None:
        """Render the data (and let the target answer it, where asked to); fail early if nothing is
        supervised."""
        data.prepare(self.target.tokenizer, self.target)
        self.data = data

    def empty_step(self) -> Step:
        """The loss of a batch, by parts without content, for the estimate of memory."""
        raise NotImplementedError

    def validation_bytes(self) -> int:
        """What validation takes beside the weights, about."""
        return 0

    def losses(self, batch, seed: int | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What is minimised, and the means to log by name; seed: of what is drawn for this batch,
        the same in all processes, None in validation."""
        raise NotImplementedError

    @property
    def training_seconds(self) -> float:
        """Since the first step, those of a run that this one goes on with included."""
        return self._before + time.perf_counter() - self._started

    def groups(self) -> list[dict]:
        """Parameter groups of the optimiser: all that is trained."""
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def save(self, folder: Path, card: str) -> None:
        """Write the model folder."""
        raise NotImplementedError

    def on_train_start(self) -> None:
        """Have the last step validated, too, also by a run that goes on from there."""
        self._started = time.perf_counter()
        trainer, loop = self.trainer, self.trainer.fit_loop.epoch_loop
        usual, last = loop._should_check_val_fx, trainer.estimated_stepping_batches

        def due(fetcher) -> bool:
            ends = trainer.global_step >= last and loop._should_check_val_epoch()
            return ends or usual(fetcher)

        loop._should_check_val_fx = due

    def training_step(self, batch, number: int) -> torch.Tensor:
        # Of each batch for itself, so that a run that goes on draws what it would have drawn.
        seed = int(key_of(self.data.seed, self.current_epoch, number), 16) % 2**62
        torch.manual_seed(seed + process_rank())
        loss, means = self.losses(batch, seed)
        self.log_means("train", means, batch)
        return loss

    def validation_step(self, batch, _: int) -> None:
        self.log_means("validation", self.losses(batch, None)[1], batch)

    def log_means(self, stage: str, means: dict[str, torch.Tensor], batch) -> None:
        """Log them; the accuracy, or else the loss, also on the progress bar. Of several processes
        all numbers are exchanged at once, and a training step waits for none."""
        shown, values = "accuracy" if "accuracy" in means else "loss", list(means.values())
        over_batches, several = stage != "train", num_processes() > 1
        count = self.num_trained_tokens(batch) if over_batches else 1
        if several:  # means are sums of this process over the mean count
            values = [mean.detach().float() for mean in values]
            values.append(torch.full_like(values[0], count))
            *values, mean_count = mean_over_processes(torch.stack(values))
            count = round(float(mean_count)) if over_batches else 1
        how = dict(batch_size=count, sync_dist=several and over_batches)
        for name, mean in zip(means, values, strict=True):
            self.log(f"{stage}/{name}", mean, prog_bar=name == shown, **how)

    def num_trained_tokens(self, batch) -> int:
        return int(batch.supervised.sum())

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(
            [group for group in self.groups() if group["params"]],
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            betas=self.betas,
        )
        steps = total_steps(self.trainer, len(self.data.train_dataloader()))
        factor = partial(schedule, warmup=min(self.warmup_steps, steps // 2), total=steps)
        rates = {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": rates}

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        state = checkpoint["state_dict"]
        kept = {name: tensor for name, tensor in state.items() if self.checkpointed in name}
        checkpoint["state_dict"], checkpoint["run"] = kept, self.run
        checkpoint["seconds"] = self.training_seconds

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """Raise `InputError` for the checkpoint of another run, or of other tensors."""
        if not isinstance(checkpoint.get("run"), dict):
            raise InputError(
                "resume: the checkpoint does not say what it is a run of; give one that train.py "
                "has written, or null"
            )
        check_same(checkpoint["run"], self.run)
        self._before = checkpoint.get("seconds", 0.0)
        found = checkpoint["state_dict"]
        for name, tensor in self.state_dict().items():
            shape = getattr(found.get(name), "shape", None)
            if self.checkpointed in name and shape != tensor.shape:
                raise InputError(
                    f"resume: the checkpoint has no tensor {name!r} of shape "
                    f"{tuple(tensor.shape)}; give another .ckpt file, or null"
                )


def check_on_one_device(target: Target) -> None:
    """`InputError` for a target that is spread over several, as Lightning would move all of it."""
    if len(set(getattr(target.model, "hf_device_map", {}).values())) > 1:
        raise InputError(
            "target.device_map: training needs the target on one device; give null, and "
            "trainer=sharded for one that is too large"
        )


def schedule(step: int, warmup: int, total: int) -> float:
    """Factor of the learning rate: 1 at the step `warmup`, 0 at `total`, linear between.

    >>> [schedule(step, 2, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    return max(0.0, min((step + 1) / max(1, warmup), (total - step) / max(1, total - warmup)))


def total_steps(trainer: L.Trainer, num_batches: int) -> int:
    """Optimiser steps of the whole run, `num_batches` batches an epoch.

    Lightning's own `estimated_stepping_batches` sets the loader up too early: a run resumed in the
    middle of an epoch would then start the epoch again.
    """
    steps = trainer.max_steps if trainer.max_steps >= 0 else math.inf
    if trainer.max_epochs >= 0:
        per_epoch = math.ceil(epoch_batches(trainer, num_batches) / trainer.accumulate_grad_batches)
        steps = min(steps, per_epoch * trainer.max_epochs)
    return steps


def epoch_batches(trainer: L.Trainer, num_batches: int) -> int:
    """How many of its batches an epoch has, as `limit_train_batches` says."""
    limit = trainer.limit_train_batches
    return min(num_batches, limit) if type(limit) is int else int(num_batches * limit)
