"""Training a lossless streaming speculator: the target is frozen, only the speculator learns.

Per batch: the main rows run through the target without gradients and leave their keys and values;
then the streams of the completion positions run through the MSA layers, exactly as deferred
streams do in decoding. At validation a few prompts are really decoded, and tau decides which
checkpoint is best.
"""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F

from slipstream.core.cache import TrainingCache
from slipstream.core.errors import InputError
from slipstream.core.masks import causal_mask
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
from slipstream.targets.target import Rows, Target
from slipstream.training.schedule import linear_schedule, total_steps
from slipstream.training.stream_loss import NO_LABEL, stream_labels, stream_loss


class StreamingTraining(L.LightningModule):
    """Lightning module of lossless Speculative Streaming (paper: section 2.4, alpha_0 = 0).

    stream_weights: alpha_j per stream, or None for 1 each. root_dropout: the share of training rows
    whose streams are not told the root, so that a speculator that may be told it (`root_rank`) also
    serves the fused schedule, which cannot. validation_prompts: how many prompts are decoded at
    each validation, with trees of `validation_budget` nodes. start_from: folder of a speculator
    whose tensors are taken over where this one has them in the same shape.
    """

    title = "Streaming speculator"
    description = "Trained by Slipstream; Speculative Streaming, lossless mode."

    def __init__(
        self,
        target: Target,
        speculator: StreamingConfig,
        learning_rate: float,
        weight_decay: float,
        warmup_steps: int,
        stream_weights: list[float] | None,
        root_dropout: float,
        validation_prompts: int,
        validation_budget: int,
        start_from: str | None,
    ):
        super().__init__()
        if target is None or speculator is None:
            raise InputError("target, speculator: both are needed to train a speculator")
        weights = stream_weights or [1.0] * speculator.num_streams
        if not 0 <= root_dropout <= 1:
            raise InputError("training.root_dropout: must be between 0 and 1")
        if len(weights) != speculator.num_streams:
            raise InputError("training.stream_weights: give one weight per stream, or null")
        self.target, self.speculator = target, StreamingSpeculator(target, speculator)
        if start_from is not None:
            start_from_speculator(self.speculator, start_from)
        self.frozen = target.model.requires_grad_(False)
        self.register_buffer("stream_weights", torch.tensor(weights), persistent=False)
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
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
        return self.speculator.config.num_msa_layers

    @property
    def rows_per_token(self) -> float:
        """Stream rows per token of a batch."""
        return self.speculator.num_streams * self.data.supervised_share

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """((gamma,) stream losses, (gamma,) accuracies, pruning loss) of one batch.

        Scores of pairs learn on top: their loss, added to the stream's, has no gradient by the
        streams. A stream that relied on its parent would be no good at naming candidates.
        """
        target, speculator = self.target, self.speculator
        labels = stream_labels(batch, speculator.num_streams)
        cache, states = TrainingCache(target.num_layers), _States(speculator.first_layer)
        length = batch.ids.shape[1]
        everywhere = torch.arange(length, device=batch.ids.device).expand_as(batch.ids)
        with torch.no_grad():
            target.forward(batch.ids, everywhere, None, cache, states)
        index = labels.positions.unsqueeze(-1).expand(-1, -1, target.hidden_size)
        hidden = states.hidden.gather(1, index)
        sees = causal_mask(length, batch.ids.device)[labels.positions].unsqueeze(1)
        roots = self._with_unknown(labels.next_tokens) if self.training else labels.next_tokens
        streams = speculator.run_streams(target, hidden, roots, labels.positions, sees, cache)
        streams = streams.unflatten(1, (-1, speculator.num_streams))
        used = labels.next_tokens != NO_LABEL
        logits, tokens = target.logits(streams[used]), labels.tokens[used]
        losses, accuracies, _ = stream_loss(logits, tokens)
        if speculator.scores_pairs:
            parents = torch.cat([labels.next_tokens[used][:, None], tokens[:, :-1]], dim=1)
            parents = parents.clamp(min=0)
            texts, known = batch.ids[used.nonzero()[:, 0]], labels.positions[used] + 2
            scored = speculator.add_pair_scores(target, logits.detach(), parents, texts, known)
            of_pairs, accuracies, _ = stream_loss(scored, tokens)
            losses = losses + of_pairs
        early = speculator.early_exit_logits(target, hidden[used])
        return losses, accuracies, F.cross_entropy(early.float(), labels.next_tokens[used])

    def _with_unknown(self, roots: torch.Tensor) -> torch.Tensor:
        """(B, P) roots, negative in some sequences; drawn from the step's number, not from the
        global generator, so that a resumed run draws the same."""
        generator = torch.Generator().manual_seed(self.global_step)
        unknown = torch.rand(len(roots), 1, generator=generator) < self.root_dropout
        return roots.masked_fill(unknown.to(roots.device), NO_LABEL)

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        losses, accuracies, pruning = self.losses(batch)
        now = time.perf_counter()
        self._log("train", losses, accuracies, pruning, batch)
        self.log("train/tokens_per_second", int(batch.lengths.sum()) / (now - self._since))
        self._since = now
        return (self.stream_weights * losses).sum() + pruning

    def validation_step(self, batch: Batch, _: int) -> None:
        self._log("validation", *self.losses(batch), batch)

    def on_validation_epoch_end(self) -> None:
        tau = self.measure_tau().tau
        self.log("validation/tau", tau, prog_bar=True)

    def measure_tau(self) -> Statistics:
        """Decode the first prompts of the validation set, deferred streams, greedy."""
        drafter = Streaming(copy.deepcopy(self.speculator), "deferred", top_k=4)
        engine = Engine(self.target, drafter, Sampling(), Limits(96), self.validation_budget)
        total = Statistics()
        for prompt in self.data.prompts("validation", self.validation_prompts):
            total += engine.generate(prompt).statistics
        return total

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(
            self.speculator.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay
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

    def _log(self, stage: str, losses, accuracies, pruning, batch: Batch) -> None:
        values = {f"{stage}/pruning_loss": pruning, f"{stage}/loss": losses.mean()}
        for stream in range(len(losses)):
            values[f"{stage}/loss_stream_{stream + 1}"] = losses[stream]
            values[f"{stage}/accuracy_stream_{stream + 1}"] = accuracies[stream]
        self.log_dict(values, batch_size=int(batch.supervised.sum()))
        self.log(f"{stage}/accuracy", accuracies.mean(), prog_bar=True, batch_size=len(batch.ids))


class _States:
    """A visitor that only remembers the main rows before the MSA layers."""

    def __init__(self, layer: int):
        self.layer = layer
        self.hidden: torch.Tensor | None = None

    @contextmanager
    def visit(self, rows: Rows) -> Iterator[Rows]:
        self.hidden = rows.hidden
        yield rows
