"""Training a small language model from scratch on prompt/completion data.

This is how the models in `slipstream.assets` were made: next-token loss on completion tokens.
Nothing here knows of speculation.
"""

from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F

from slipstream.assets import locate
from slipstream.data.batches import Batch
from slipstream.data.prompt_completion import PromptCompletionData
from slipstream.data.tokenizer import train_tokenizer
from slipstream.targets.loading import load_target
from slipstream.training.schedule import linear_schedule, total_steps


class LanguageModelTraining(L.LightningModule):
    """Next-token training of a new transformers model.

    architecture: `model_type` and the keyword arguments of its transformers config.
    tokenizer: folder of a tokenizer to share, or None to train one with `vocab_size` entries.
    start_from: folder of a model to go on from, with its own architecture and tokenizer (the other
    arguments for them are not used then), or None to start from scratch.
    """

    title = "Small language model"
    description = "Trained from scratch by Slipstream, next-token loss on completions."
    rows_per_token = 1

    def __init__(
        self,
        architecture: dict,
        vocab_size: int,
        tokenizer: str | None,
        start_from: str | None,
        learning_rate: float,
        weight_decay: float,
        warmup_steps: int,
    ):
        super().__init__()
        self.architecture, self.vocab_size = architecture, vocab_size
        self.tokenizer_path, self.start_from = tokenizer, start_from
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps = warmup_steps
        self.model, self.tokenizer, self.data = None, None, None

    def prepare(self, data: PromptCompletionData) -> None:
        """Make (or open) the model and its tokenizer, and render the data."""
        self.model, self.tokenizer = self._new(data) if self.start_from is None else self._opened()
        data.prepare(self.tokenizer)
        self.data = data

    def _new(self, data: PromptCompletionData) -> tuple:
        """(model, tokenizer) with random weights."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        if self.tokenizer_path is None:
            tokenizer = train_tokenizer(data.rows("train"), self.vocab_size)
        else:
            tokenizer = AutoTokenizer.from_pretrained(locate(self.tokenizer_path))
        config = AutoConfig.for_model(
            **self.architecture,
            vocab_size=len(tokenizer),
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        return AutoModelForCausalLM.from_config(config), tokenizer

    def _opened(self) -> tuple:
        """(model, tokenizer) of `start_from`, in float32."""
        target = load_target(self.start_from, packed=False)
        return target.model.requires_grad_(True).train(), target.tokenizer

    @property
    def model_config(self):
        return self.model.config

    @property
    def num_trained_layers(self) -> int:
        return self.model.config.num_hidden_layers

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy over the batch's supervised tokens."""
        hidden = self.model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        predicts = batch.supervised[:, 1:]
        logits = self.model.lm_head(hidden[:, :-1][predicts])
        return F.cross_entropy(logits.float(), batch.ids[:, 1:][predicts])

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        self.log(
            "validation/loss",
            self.loss(batch),
            prog_bar=True,
            batch_size=int(batch.supervised.sum()),
        )

    def configure_optimizers(self) -> dict[str, object]:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.98))
        steps = total_steps(self.trainer, len(self.data.train_dataloader()))
        return {
            "optimizer": optimizer,
            "lr_scheduler": linear_schedule(optimizer, self.warmup_steps, steps),
        }

    def save(self, folder: Path, card: str) -> None:
        """Write the model in bfloat16, the tokenizer and the card to `folder`."""
        self.model.to(torch.bfloat16).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
