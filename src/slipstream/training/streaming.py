"""Training a streaming speculator, in lossless or shared mode (paper: section 2.4, Eq. 6).

Lossless: the target is frozen, only the speculator learns. Shared: LoRA layers of the target learn
with it. The forwards are those of decoding; `segments.py` says how they become losses. At
validation a few prompts are really decoded, and tau decides which checkpoint is best.
"""

import time
from pathlib import Path

import lightning as L
import torch

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.batches import Batch
from slipstream.data.prompt_completion import PromptCompletionData
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.streaming import Streaming
from slipstream.speculators.checkpoint import save_speculator, start_from_speculator
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.target import Target
from slipstream.training.schedule import linear_schedule, total_steps
from slipstream.training.segments import lossless_losses, shared_losses
from slipstream.training.settings import check_numbers
from slipstream.training.stream_losses import StreamLosses


class StreamingTraining(L.LightningModule):
    """Lightning module of Speculative Streaming.

    learning_rate: of the speculator's own tensors; lora_learning_rate: of the LoRA layers of shared
    mode, None for the same. main_weight: alpha_0, None for 0 (lossless) or 1 (shared);
    stream_weights: alpha_j per stream, None for 1 (lossless) or 0.1 (shared) each. root_dropout:
    the share of training rows whose streams are not told the root, so that a speculator that may
    be told it (`root_rank`) also serves the fused schedule, which cannot. num_segments: parts of a
    completion that are worked on one after the other, None for all at once. validation_prompts:
    how many prompts are decoded at each validation, with trees of `validation_budget` nodes.
    start_from: folder of a speculator whose tensors are taken over where this one has them in the
    same shape.
    """

    title = "Streaming speculator"

    def __init__(
        self,
        target: Target,
        speculator: StreamingConfig,
        learning_rate: float,
        lora_learning_rate: float | None,
        weight_decay: float,
        warmup_steps: int,
        main_weight: float | None,
        stream_weights: list[float] | None,
        root_dropout: float,
        num_segments: int | None,
        validation_prompts: int,
        validation_budget: int,
        start_from: str | None,
    ):
        super().__init__()
        if target is None or speculator is None:
            raise InputError("target, speculator: both are needed to train a speculator")
        check_numbers(
            learning_rate=learning_rate,
            lora_learning_rate=lora_learning_rate,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            main_weight=main_weight,
            stream_weights=stream_weights,
            root_dropout=root_dropout,
        )
        if not 0 <= root_dropout <= 1:
            raise InputError("training.root_dropout: must be between 0 and 1")
        shared = speculator.mode == "shared"
        weights = stream_weights or [0.1 if shared else 1.0] * speculator.num_streams
        if len(weights) != speculator.num_streams:
            raise InputError("training.stream_weights: give one weight per stream, or null")
        if not shared and main_weight:
            raise InputError("training.main_weight: lossless mode does not train the main stream")
        if num_segments is not None and num_segments < 1:
            raise InputError("training.num_segments: must be at least 1, or null")
        self.description = f"Trained by Slipstream; Speculative Streaming, {speculator.mode} mode."
        self.main_weight = float(shared) if main_weight is None else main_weight
        self.num_segments = num_segments
        self.target, self.speculator = target, StreamingSpeculator(target, speculator)
        if start_from is not None:
            start_from_speculator(self.speculator, start_from)
        self.frozen = target.model.requires_grad_(False)
        self.register_buffer("stream_weights", torch.tensor(weights), persistent=False)
        self.learning_rate, self.lora_learning_rate = learning_rate, lora_learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps, self.root_dropout = warmup_steps, root_dropout
        self.validation_prompts, self.validation_budget = validation_prompts, validation_budget
        self.strict_loading = False
        self.data: PromptCompletionData | None = None
        self._since = time.perf_counter()

    def prepare(self, data: PromptCompletionData) -> None:
        """Render (and where asked, regenerate) the data; fail early if nothing is supervised."""
        data.prepare(self.target.tokenizer, self.target)
        self.data = data

    @property
    def model_config(self):
        return self.frozen.config

    @property
    def num_trained_layers(self) -> int:
        shared = self.speculator.config.mode == "shared"
        return self.target.num_layers if shared else self.speculator.config.num_msa_layers

    @property
    def rows_per_token(self) -> float:
        """Trained rows per token of a batch: streams, and main rows in shared mode."""
        main = self.speculator.config.mode == "shared"
        return main + self.speculator.num_streams * self.data.supervised_share

    def losses(self, batch: Batch) -> StreamLosses:
        """The losses of one batch, in segments or at once."""
        speculator, streams = self.speculator, self.stream_weights
        target = speculator.adapted(self.target)
        if speculator.config.mode == "shared":
            return shared_losses(
                target, speculator, batch, self.main_weight, streams, self.num_segments
            )
        unknown = self._unknown_roots(len(batch.ids)) if self.training else None
        return lossless_losses(target, speculator, batch, streams, self.num_segments, unknown)

    def _unknown_roots(self, count: int) -> torch.Tensor:
        """(B,) sequences whose streams are not told the root: drawn from the step's number, not
        from the global generator, so that a resumed run draws the same."""
        generator = torch.Generator().manual_seed(self.global_step)
        return torch.rand(count, generator=generator) < self.root_dropout

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        losses = self.losses(batch)
        now = time.perf_counter()
        self._log("train", losses, batch)
        self.log("train/tokens_per_second", int(batch.lengths.sum()) / (now - self._since))
        self._since = now
        return losses.total

    def validation_step(self, batch: Batch, _: int) -> None:
        self._log("validation", self.losses(batch), batch)

    def on_validation_epoch_end(self) -> None:
        tau = self.measure_tau().tau
        self.log("validation/tau", tau, prog_bar=True)

    def measure_tau(self) -> Statistics:
        """Decode the first prompts of the validation set, greedy."""
        drafter = Streaming(self.speculator, "auto", top_k=4)
        engine = Engine(self.target, drafter, Sampling(), Limits(96), self.validation_budget)
        total = Statistics()
        for prompt in self.data.prompts("validation", self.validation_prompts):
            total += engine.generate(prompt).statistics
        return total

    def configure_optimizers(self) -> dict[str, object]:
        lora, own = [], []
        for name, parameter in self.speculator.named_parameters():
            (lora if name.startswith("lora.") else own).append(parameter)
        groups = [
            {"params": own},
            {"params": lora, "lr": self.lora_learning_rate or self.learning_rate},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
        )
        steps = total_steps(self.trainer, len(self.data.train_dataloader()))
        return {
            "optimizer": optimizer,
            "lr_scheduler": linear_schedule(optimizer, self.warmup_steps, steps),
        }

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Checkpoints hold what is trained and nothing of the target."""
        checkpoint["state_dict"] = {
            name: tensor
            for name, tensor in checkpoint["state_dict"].items()
            if name.startswith("speculator.")
        }

    def save(self, folder: Path, card: str) -> None:
        """Write the speculator folder."""
        save_speculator(folder, self.speculator, self.target, self.data.longest, card)

    def _log(self, stage: str, losses: StreamLosses, batch: Batch) -> None:
        values = {f"{stage}/loss": losses.streams.mean(), f"{stage}/pruning_loss": losses.pruning}
        if self.main_weight:
            values[f"{stage}/main_loss"] = losses.main
        for stream, (loss, accuracy) in enumerate(
            zip(losses.streams, losses.accuracies, strict=True), start=1
        ):
            values[f"{stage}/loss_stream_{stream}"] = loss
            values[f"{stage}/accuracy_stream_{stream}"] = accuracy
        self.log_dict(values, batch_size=int(batch.supervised.sum()))
        mean = losses.accuracies.mean()
        self.log(f"{stage}/accuracy", mean, prog_bar=True, batch_size=len(batch.ids))
