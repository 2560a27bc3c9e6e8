"""The trained part of Speculative Streaming (section 2). What runs stands in `steps.py`, how it
learns in `segments.py`."""

import copy

import torch
from torch import nn

from slipstream.core.errors import InputError
from slipstream.core.processes import num_processes, process_rank
from slipstream.speculators.base import Batch
from slipstream.speculators.losses import guess_means
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.segments import lossless_losses, shared_losses
from slipstream.speculators.streaming.steps import StreamSteps
from slipstream.targets.lora import with_lora
from slipstream.targets.quantized import tensors_of
from slipstream.targets.target import Target


class StreamingSpeculator(StreamSteps):
    """gamma streams in the top N_s layers of `target`; adapters act on stream rows alone (lossless
    mode), or are LoRA layers for all rows of the target (shared)."""

    kind = StreamingConfig.kind
    Config = StreamingConfig
    title = "Streaming speculator"
    drafter_class = "slipstream.drafters.streaming:Streaming"

    def __init__(self, target: Target, config: StreamingConfig):
        super().__init__(target, config)
        self.source = f"Speculative Streaming, {config.mode} mode"
        self.shared = config.mode == "shared"
        self.lora = None
        if config.mode == "shared":
            self._base, (self._adapted, trained) = target, with_lora(target, config.lora)
            self.lora = nn.ParameterDict(
                {name.replace(".", "/"): tensor for name, tensor in trained.items()}
            )
            # Theirs is switched on and off with the speculator's.
            layers = self._adapted.model.named_modules()
            self.dropouts = nn.ModuleList(m for name, m in layers if name.endswith("lora_dropout"))

    def adapted(self, target: Target) -> Target:
        """The target whose forwards the streams take part in: in shared mode, `target` with this
        speculator's LoRA layers, to be trained or merged; in lossless mode `target` itself.

        Raises `InputError` in shared mode for another target than it was made for.
        """
        if self.lora is None:
            return target
        if target is not self._base:
            raise InputError("speculator: it was made for another target; load it for this one")
        return self._adapted

    def placed(self, target: Target) -> "StreamingSpeculator":
        """A copy on `target`'s device (each adapter on its layer's) and in its dtype, in eval mode;
        this one, which may be in training, stays as it is, and the target's weights are shared."""
        kept = []
        if self.lora is not None:
            trained = set(map(id, self.lora.values()))
            kept = [t for t in tensors_of(self._adapted.model) if id(t) not in trained]
            kept += [self._base, self._adapted.tokenizer]
        placed = copy.deepcopy(self, {id(part): part for part in kept})
        placed.to(target.device, target.dtype)
        if placed.adapters is not None:
            placed.adapters.place(target)
        return placed.eval()

    def first_streams(self, count: int) -> "StreamingSpeculator":
        """The first `count` streams alone, with the same tensors. A stream sees none that come
        after it, so in lossless mode these write what they write here. Not to be saved: `config` is
        that of all streams."""
        fewer = copy.copy(self)
        fewer.num_streams = count
        return fewer

    def losses(
        self, target: Target, batch: Batch, seed: int | None = None, num_segments: int | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Eq. 6, with the losses of the pruning head and of the scores of pairs."""
        config, target, main, unknown = self.config, self.adapted(target), 0.0, None
        default = 0.1 if self.shared else 1.0
        weights = config.stream_weights or [default] * self.num_streams
        weights = torch.tensor(weights, device=batch.ids.device)
        if self.shared:
            main = 1.0 if config.main_weight is None else config.main_weight
            losses = shared_losses(target, self, batch, main, weights, num_segments)
        else:
            if seed is not None:
                # For all processes, each of which has every n-th row of their common batch.
                rows, count = len(batch.ids), num_processes()
                generator = torch.Generator().manual_seed(seed)
                drawn = torch.rand((rows + 1) * count, generator=generator)
                unknown = drawn[process_rank() :: count][:rows] < config.root_dropout
            losses = lossless_losses(target, self, batch, weights, num_segments, unknown)
        means = guess_means(losses.streams, losses.accuracies, "stream")
        means["pruning_loss"] = losses.pruning
        return losses.total, means | ({"main_loss": losses.main} if main else {})
