"""Plain next-token LoRA fine-tuning of a target: the baseline that shared mode is compared with.

It writes a PEFT adapter folder, which `target.adapter=FOLDER` and PEFT itself open. Nothing here
knows of speculation.
"""

from pathlib import Path

import lightning as L
import torch

from slipstream.core.errors import InputError
from slipstream.data.batches import Batch
from slipstream.data.prompt_completion import PromptCompletionData
from slipstream.targets.lora import LoraSettings, save_lora, with_lora
from slipstream.targets.target import Target
from slipstream.training.head_loss import head_loss
from slipstream.training.schedule import linear_schedule, total_steps
from slipstream.training.settings import check_numbers


class FineTuning(L.LightningModule):
    """Lightning module: cross-entropy of the completion tokens, LoRA layers alone are trained."""

    title = "LoRA adapter"
    description = "Trained by Slipstream, next-token loss on completions."
    rows_per_token = 1

    def __init__(
        self,
        target: Target,
        lora: LoraSettings,
        learning_rate: float,
        weight_decay: float,
        warmup_steps: int,
    ):
        super().__init__()
        if target is None:
            raise InputError("target: a target is needed to fine-tune it")
        check_numbers(
            learning_rate=learning_rate, weight_decay=weight_decay, warmup_steps=warmup_steps
        )
        target.model.requires_grad_(False)
        self.target, trained = with_lora(target, lora)
        self.model = self.target.model
        self.trained = list(trained.values())
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps = warmup_steps
        self.strict_loading = False
        self.data: PromptCompletionData | None = None

    def prepare(self, data: PromptCompletionData) -> None:
        """Render the data (and let the target answer it, where asked to)."""
        data.prepare(self.target.tokenizer, self.target)
        self.data = data

    @property
    def model_config(self):
        return self.model.config

    @property
    def num_trained_layers(self) -> int:
        return self.target.num_layers

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy over the batch's supervised tokens."""
        positions = torch.arange(batch.ids.shape[1], device=batch.ids.device)
        rows = self.target.forward(batch.ids, positions.expand_as(batch.ids), None, None)
        predicts = batch.supervised[:, 1:]
        hidden = self.target.norm(rows.hidden[:, :-1][predicts])
        return head_loss(self.target.head, hidden, batch.ids[:, 1:][predicts])[0].mean()

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        tokens = int(batch.supervised.sum())
        self.log("validation/loss", self.loss(batch), prog_bar=True, batch_size=tokens)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(
            self.trained, lr=self.learning_rate, weight_decay=self.weight_decay
        )
        steps = total_steps(self.trainer, len(self.data.train_dataloader()))
        return {
            "optimizer": optimizer,
            "lr_scheduler": linear_schedule(optimizer, self.warmup_steps, steps),
        }

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Checkpoints hold what is trained and nothing of the target."""
        checkpoint["state_dict"] = {
            name: tensor for name, tensor in checkpoint["state_dict"].items() if ".lora_" in name
        }

    def save(self, folder: Path, card: str) -> None:
        """Write the adapter folder."""
        save_lora(folder, self.target)
        (folder / "README.md").write_text(card, encoding="utf-8")
