"""Medusa-1: heads that each guess one of the coming tokens from the last state of the present one.

Source: Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads": heads over the last hidden state, of one residual SiLU block each, and a sparse tree chosen
by their calibrated top-k accuracies. Heads know neither each other's tokens nor the root.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.core.errors import InputError
from slipstream.core.processes import mean_over_processes
from slipstream.core.settings import Count, PositiveShare, Size
from slipstream.speculators.base import Batch, DraftingSpeculator, SpeculatorConfig, causal_rows
from slipstream.speculators.losses import NO_LABEL, future_tokens, guess_means, head_loss, in_slices
from slipstream.targets.packed import PackedLinear, frozen_linear
from slipstream.targets.rows import rows_at
from slipstream.targets.target import Target


@dataclass(frozen=True)
class MedusaConfig(SpeculatorConfig):
    """num_heads: how many tokens beyond the next one are guessed. own_heads: whether each head has
    an LM head of its own, at first a copy of the target's (the paper), or they share the target's,
    frozen. decay: head k counts decay^k in the loss. num_ranks: of how many most probable tokens of
    each head the accuracy is measured, and no more are drafted."""

    kind: ClassVar[str] = "medusa"
    num_heads: Size = 4
    own_heads: bool = True
    decay: PositiveShare = 0.8
    num_ranks: Count = 10


class MedusaSpeculator(DraftingSpeculator):
    """Head k: h + SiLU(W_k h + b_k), then an LM head; W_k and b_k are zero at first, so that it
    begins by repeating what the target says of the next token.

    accuracies: (heads, ranks), how often the i-th guess of a head is right; measured by
    `calibrate`, before that a half, a quarter and so on.
    """

    kind = MedusaConfig.kind
    Config = MedusaConfig
    title = "Medusa speculator"
    source = "Medusa-1, heads over a frozen target"
    drafter_class = "slipstream.drafters.medusa:Medusa"

    def __init__(self, target: Target, config: MedusaConfig):
        super().__init__()
        self.config = config
        width, vocabulary = target.head.in_features, target.vocab_size
        if config.num_ranks > vocabulary:
            raise InputError(
                f"speculator.num_ranks: must be at most {vocabulary}, the target's vocabulary"
            )
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(config.num_heads))
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.heads = None
        if config.own_heads:
            self.heads = nn.ModuleList(_copied(target.head) for _ in self.blocks)
        guesses = 0.5 ** torch.arange(1, config.num_ranks + 1)
        self.register_buffer("accuracies", guesses.repeat(config.num_heads, 1))

    def logits(self, target: Target, normed: torch.Tensor) -> torch.Tensor:
        """(..., D) last states after the final norm -> (..., heads, V)."""
        each = zip(self._heads(target), self.blocks, strict=True)
        found = [head(normed + F.silu(block(normed))) for head, block in each]
        return torch.stack(found, dim=-2).to(normed.device)

    def _heads(self, target: Target) -> Iterable[nn.Module]:
        return [target.head] * len(self.blocks) if self.heads is None else self.heads

    def losses(
        self, target: Target, batch: Batch, seed: int | None = None, num_segments: int | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The cross-entropy of each head, head k weighted by decay^k.

        Of its rows the logits alone are large, and these come in parts, whatever `num_segments` is.
        """
        losses, accuracies = [], []
        for head, states, tokens in self._guesses(target, batch):
            count = mean_over_processes(torch.tensor(len(tokens), device=tokens.device))
            own, guesses = head_loss(head, states, tokens)
            losses.append(own.sum() / count.clamp(min=1))
            accuracies.append((guesses == tokens).to(own).sum() / count.clamp(min=1))
        losses, accuracies = torch.stack(losses), torch.stack(accuracies)
        weights = self.config.decay ** torch.arange(1, len(losses) + 1).to(losses)
        return losses @ weights, guess_means(losses.detach(), accuracies, "head")

    def _guesses(
        self, target: Target, batch: Batch
    ) -> Iterator[tuple[nn.Module, torch.Tensor, torch.Tensor]]:
        """Of each head its LM head, (M, D) states for it, and the (M,) tokens they stand for."""
        future = future_tokens(batch, len(self.blocks))
        with torch.no_grad():
            hidden = causal_rows(target, batch.ids).hidden
            normed = target.norm(rows_at(hidden, future.positions))
        each = zip(self._heads(target), self.blocks, future.tokens.unbind(-1), strict=True)
        for head, block, tokens in each:
            known = tokens != NO_LABEL
            rows = normed[known]
            yield head, rows + F.silu(block(rows)), tokens[known]

    @torch.no_grad()
    def calibrate(self, target: Target, batches: Iterable[Batch]) -> None:
        """Count how often each of the most probable tokens of a head is the right one."""
        hits, drafting = torch.zeros_like(self.accuracies), self.placed(target)
        counts = hits.new_zeros(len(hits), 1)
        for batch in batches:
            for place, (head, states, tokens) in enumerate(drafting._guesses(target, batch)):

                def best_of(rows: torch.Tensor, head: nn.Module = head) -> tuple[torch.Tensor]:
                    return (head(rows).topk(self.config.num_ranks).indices,)

                best = in_slices(best_of, head.out_features, states)[0]
                hits[place] += (best == tokens[:, None]).sum(0)
                counts[place] += len(tokens)
        hits, counts = mean_over_processes(hits), mean_over_processes(counts)
        self.accuracies.copy_(hits / counts.clamp(min=1))


def _copied(head: nn.Module) -> nn.Module:
    """A trainable float32 copy of a target's LM head."""
    if type(head) not in (nn.Linear, PackedLinear):
        raise InputError(
            "speculator.own_heads: the target's LM head is no plain linear layer, so it cannot be "
            "copied; set it to false"
        )
    weight = head.weight.to(torch.float32, copy=True)
    bias = None if head.bias is None else head.bias.to(torch.float32, copy=True)
    return frozen_linear(weight, bias).requires_grad_()
