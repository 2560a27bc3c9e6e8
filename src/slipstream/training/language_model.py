"""Training a small language model on prompt/completion data, from scratch or on from another.

This is how the models in `slipstream.assets` were made: next-token loss on completion tokens, or
the distribution of a teacher there (a draft model learns what its target says). Nothing here knows
of speculation.
"""

from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F

from slipstream.assets import locate
from slipstream.core.errors import InputError
from slipstream.data.batches import Batch
from slipstream.data.prompt_completion import PromptCompletionData
from slipstream.data.tokenizer import train_tokenizer
from slipstream.targets.loading import load_target
from slipstream.targets.target import Target
from slipstream.training.schedule import linear_schedule, total_steps
from slipstream.training.settings import check_numbers


class LanguageModelTraining(L.LightningModule):
    """Next-token training of a transformers model.

    architecture: `model_type` and the keyword arguments of its transformers config.
    tokenizer: folder of a tokenizer to share, or None to train one with `vocab_size` entries.
    start_from: folder of a model to go on from, with its own architecture and tokenizer (the other
    arguments for them are not used then), or None to start from scratch.
    teacher: a model whose next-token distribution is learned in place of the text's next token, by
    forward KL (distillation: Hinton et al. 2015; for draft models DistillSpec, Zhou et al. 2023);
    None for none. It also answers generated prompts (`data.generated_rows`).
    """

    title = "Small language model"
    rows_per_token = 1

    def __init__(
        self,
        architecture: dict,
        vocab_size: int,
        tokenizer: str | None,
        start_from: str | None,
        teacher: Target | None,
        learning_rate: float,
        weight_decay: float,
        warmup_steps: int,
    ):
        super().__init__()
        check_numbers(
            learning_rate=learning_rate, weight_decay=weight_decay, warmup_steps=warmup_steps
        )
        self.architecture, self.vocab_size = architecture, vocab_size
        self.tokenizer_path, self.start_from = tokenizer, start_from
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps = warmup_steps
        self.teacher = teacher
        self.description = (
            "Trained by Slipstream, next-token loss on completions."
            if teacher is None
            else f"Trained by Slipstream to predict as {teacher.name} does (forward KL)."
        )
        self.model, self.tokenizer, self.data = None, None, None

    def prepare(self, data: PromptCompletionData) -> None:
        """Make (or open) the model and its tokenizer, and render the data."""
        self.model, self.tokenizer = self._new(data) if self.start_from is None else self._opened()
        if self.teacher is not None:
            if self.teacher.tokenizer.get_vocab() != self.tokenizer.get_vocab():
                raise InputError(
                    "training.teacher: it has another vocabulary than the model; give its "
                    "tokenizer as training.tokenizer"
                )
            self.teacher.model.requires_grad_(False)
        data.prepare(self.tokenizer, self.teacher)
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
            vocab_size=self.teacher.vocab_size if self.teacher else len(tokenizer),
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
        """Mean over the batch's supervised tokens of the cross-entropy, or of the KL divergence
        from the teacher."""
        predicts = batch.supervised[:, 1:]
        hidden = self.model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden[:, :-1][predicts]).float()
        if self.teacher is None:
            return F.cross_entropy(logits, batch.ids[:, 1:][predicts])
        with torch.no_grad():
            positions = torch.arange(batch.ids.shape[1], device=batch.ids.device)
            rows = self.teacher.forward(batch.ids, positions.expand_as(batch.ids), None, None)
            teaching = self.teacher.logits(rows.hidden[:, :-1][predicts]).float()
        ours, theirs = logits.log_softmax(-1), teaching.log_softmax(-1)
        return F.kl_div(ours, theirs, reduction="batchmean", log_target=True)

    def on_fit_start(self) -> None:
        if self.teacher is not None:
            self.teacher.model.to(self.device)

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
