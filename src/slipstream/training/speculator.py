"""Training any speculator that drafts: its losses over a frozen target, tau by real decoding.

What is learned and how stands with the speculator. Its tau decides which checkpoint is best.
"""

import time
from itertools import islice
from pathlib import Path

import torch

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.core.settings import Amount, Budget, Count, NotNegative, Text
from slipstream.data.batches import Batch
from slipstream.data.prompt_completion import PromptCompletionData
from slipstream.data.rows import spread
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.statistics import Statistics
from slipstream.speculators.base import DraftingSpeculator, SpeculatorConfig, new_speculator
from slipstream.speculators.checkpoint import save_speculator, start_from_speculator
from slipstream.targets.lora import merged_bytes
from slipstream.targets.target import Target
from slipstream.training.card import speculator_card
from slipstream.training.memory import Step, empty_target
from slipstream.training.module import TrainingModule, check_on_one_device

MEASURED = 96
"""Most tokens of an answer that a validation decodes."""
USUAL_RATE = 2.0
"""Of AdamW, times the hidden size: 5.2e-3 at 384, where 4e-3 and 5e-3 were measured to be best, and
4.9e-4 at 4,096, where the paper has 5e-4."""


def losses_of(
    target: Target, config: SpeculatorConfig, num_segments: int | None, checkpointing: bool = False
) -> Step:
    """The loss that a new speculator of this config has over a batch."""
    speculator = new_speculator(target, config)
    speculator.adapted(target).checkpointing = checkpointing
    return lambda batch: speculator.losses(target, batch, 0, num_segments)[0]


def check_tensors(speculator: DraftingSpeculator) -> None:
    """`InputError` for a kind with tensors that its folder could not be opened with."""
    known = set()
    for name, tensor in speculator.state_dict().items():
        place = tensor.untyped_storage().data_ptr() if tensor.numel() else name
        if place in known or not tensor.is_floating_point() or not tensor.isfinite().all():
            raise InputError(
                f"speculator: the tensor {name!r} of kind {speculator.kind!r} is not finite floats "
                "of its own, as a folder has them; register other buffers with persistent=False"
            )
        known.add(place)


class SpeculatorTraining(TrainingModule):
    """Lightning module of every speculator that drafts.

    learning_rate: of the speculator's own tensors, None for `USUAL_RATE` over the hidden size;
    lora_learning_rate: of LoRA layers of the target that learn with it, None for the same.
    num_segments: parts of a completion that are worked on one after the other, None for all at
    once. checkpointing: keep no activations inside of a layer, and run it again in the backward
    pass. validation_prompts: how many are decoded at each validation, with trees of
    `validation_budget` nodes. start_from: folder of a speculator whose tensors are taken over where
    this one has them in the same shape.
    """

    checkpointed = "speculator."

    def __init__(
        self,
        target: Target,
        speculator: SpeculatorConfig,
        learning_rate: NotNegative | None,
        lora_learning_rate: NotNegative | None,
        weight_decay: NotNegative,
        warmup_steps: Amount,
        num_segments: Count | None,
        checkpointing: bool,
        validation_prompts: Count,
        validation_budget: Budget,
        start_from: Text | None,
    ):
        if learning_rate is None:
            learning_rate = USUAL_RATE / target.hidden_size
        super().__init__(learning_rate, weight_decay, warmup_steps)
        self.target, self.speculator = target, new_speculator(target, speculator)
        if not isinstance(self.speculator, DraftingSpeculator):
            raise InputError(
                f"speculator: kind {speculator.kind!r} does not draft; train it with "
                "training=verifier"
            )
        check_on_one_device(target)
        check_tensors(self.speculator)
        if start_from is not None:
            start_from_speculator(self.speculator, start_from)
        self.speculator.adapted(target).checkpointing = self.checkpointing = checkpointing
        self.frozen = target.model.requires_grad_(False)
        self.title = self.speculator.title
        self.description = f"Trained by Slipstream; {self.speculator.source}."
        self.lora_learning_rate, self.num_segments = lora_learning_rate, num_segments
        self.validation_prompts, self.validation_budget = validation_prompts, validation_budget
        self._since = time.perf_counter()

    def on_fit_start(self) -> None:
        if self.num_segments is not None and self.trainer.precision == "16-mixed":
            raise InputError(
                "trainer.precision: with training.num_segments the gradients of 16-mixed would not "
                "be scaled; give bf16-mixed or 32-true, or training.num_segments=null"
            )

    def empty_step(self) -> Step:
        target = empty_target(self.frozen.config, self.target.dtype)
        return losses_of(target, self.speculator.config, self.num_segments, self.checkpointing)

    def prepare(self, data: PromptCompletionData) -> None:
        data.one_answer = self.shared  # in a conversation those of before have no streams any more
        super().prepare(data)

    @property
    def shared(self) -> bool:
        """Whether the target learns, too."""
        return self.speculator.adapted(self.target) is not self.target

    def validation_bytes(self) -> int:
        """The last step's gradients, and the copies that decode: of the speculator, and of a target
        that learns."""
        own = sum(parameter.nbytes for parameter in self.speculator.parameters())
        return 2 * own + (merged_bytes(self.speculator.adapted(self.target)) if self.shared else 0)

    def losses(self, batch, seed: int | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.speculator.losses(self.target, batch, seed, self.num_segments)

    def training_step(self, batch: Batch, number: int) -> torch.Tensor:
        loss = super().training_step(batch, number)
        now = time.perf_counter()
        tokens = self.trainer.world_size * batch.lengths.sum()
        self.log("train/tokens_per_second", tokens / (now - self._since))
        self._since = now
        return loss

    def on_validation_epoch_end(self) -> None:
        """Measure tau: decode prompts of the validation set, greedy, as far as answers of the data
        may go, but no more than `MEASURED` tokens."""
        batches = islice(self.data.val_dataloader(), self.trainer.num_val_batches[0])
        self.speculator.calibrate(self.target, (batch.to(self.device) for batch in batches))
        drafter, limits = self.speculator.drafter(), Limits(min(MEASURED, self.data.max_new_tokens))
        engine = Engine(self.target, drafter, Sampling(), limits, self.validation_budget)
        samples = spread(self.data.samples["validation"], self.validation_prompts)
        found = [engine.generate(sample.prompt).statistics for sample in samples]
        tau = sum(found, Statistics()).tau
        self.log("validation/tau", tau, prog_bar=True, sync_dist=True)  # one best state for all

    def groups(self) -> list[dict]:
        named = list(self.speculator.named_parameters())
        lora = [parameter for name, parameter in named if name.startswith("lora.")]
        own = [parameter for name, parameter in named if not name.startswith("lora.")]
        rate = self.learning_rate if self.lora_learning_rate is None else self.lora_learning_rate
        return [{"params": own}, {"params": lora, "lr": rate}]

    def save(self, folder: Path, card: str) -> None:
        card = speculator_card(self, card)
        save_speculator(folder, self.speculator, self.target, self.data.longest, card)
