"""Checkpoints of a run: written as whole files, and true to the last optimiser step."""

import sys
from typing import Any

import lightning as L
from lightning.pytorch.plugins.io import TorchCheckpointIO

from slipstream.core.files import save_tensors


class WholeCheckpoints(TorchCheckpointIO):
    """Lightning's plugin for checkpoint files; the one before stays until the next is complete.

    Lightning's own writes into the system's temporary folder and copies from there, where that is
    another file system.
    """

    def save_checkpoint(self, checkpoint: dict, path: str, storage_options: Any = None) -> None:
        save_tensors(path, checkpoint)


def go_back_to_last_step(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Let `checkpoint` say that nothing was begun since the last optimiser step.

    A batch that was broken off, and batches whose gradients were still being accumulated, have
    left no trace in the weights: a resumed run works on them again. A validation that was broken
    off is repeated from its first batch.
    """
    state = checkpoint["loops"]["fit_loop"]
    if trainer.interrupted and trainer.validating:
        # Lightning goes on with a validation whose last batch was started and not processed.
        validation = state["epoch_loop.val_loop.batch_progress"]
        before = validation["total"]["completed"] - validation["current"]["completed"]
        begun = dict(ready=before + 1, started=before + 1)
        validation["total"] = dict(begun, processed=before, completed=before)
        validation["current"] = dict.fromkeys(validation["current"], 0)
    steps = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    progress = state["epoch_loop.batch_progress"]
    # The last step of an epoch may have had fewer batches.
    done = steps["current"]["completed"] * trainer.accumulate_grad_batches
    done = min(done, trainer.num_training_batches)
    current, total = progress["current"], progress["total"]
    ended = done == trainer.num_training_batches  # the epoch, maybe before its last batch
    if current["ready"] == current["processed"] == done and not ended:
        return
    for stage in current:
        total[stage] -= current[stage] - done
        current[stage] = done
    progress["is_last_batch"] = ended
    for loader in state["state_dict"].get("combined_loader", []):
        loader["position"] = sys.maxsize if ended else done
