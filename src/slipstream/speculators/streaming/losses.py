"""What the rows of a batch, or of a segment of it, come to: the losses of Eq. 6.

Sums over tokens first, since they add up over segments; means at the end. How rows come about, all
at once or segment by segment, is `segments.py`'s business.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.core.processes import mean_over_processes
from slipstream.speculators.base import Batch
from slipstream.speculators.head_loss import head_loss
from slipstream.speculators.labels import NO_LABEL, future_tokens, guess_means
from slipstream.speculators.streaming.steps import StreamSteps
from slipstream.targets.target import Target

PAIR_LOGITS = 2**24
"""So many logits with scores of pairs are held at a time."""


class Sums(NamedTuple):
    """Sums over the tokens of a segment: losses of the main rows, of the pruning head, of each
    stream (gamma,) and of each with its scores of pairs (gamma,); and right guesses (gamma,)."""

    main: torch.Tensor
    pruning: torch.Tensor
    streams: torch.Tensor
    pairs: torch.Tensor
    hits: torch.Tensor

    def plus(self, other: "Sums") -> "Sums":
        return Sums(*map(torch.add, self, other))

    def detach(self) -> "Sums":
        return Sums(*(part.detach() for part in self))


@dataclass
class StreamLosses:
    """Means over the tokens of a batch: main, pruning, streams (gamma,), pairs (gamma,), accuracies
    (gamma,); and `total`, the weighted sum of Eq. 6 plus the losses of the pruning head and of the
    scores of pairs, which alone carries gradients.

    Scores of pairs learn on top of the streams, which stay as they are: a stream that relied on its
    parent would be no good at naming candidates.
    """

    total: torch.Tensor
    main: torch.Tensor
    pruning: torch.Tensor
    streams: torch.Tensor
    pairs: torch.Tensor
    accuracies: torch.Tensor

    def means(self, with_main: bool) -> dict[str, torch.Tensor]:
        """What is logged, by name."""
        means = guess_means(self.streams, self.accuracies, "stream")
        means["pruning_loss"] = self.pruning
        return means | ({"main_loss": self.main} if with_main else {})


class BatchLosses:
    """One batch with its labels, and what a segment of it needs to become a loss."""

    def __init__(
        self,
        target: Target,
        speculator: StreamSteps,
        batch: Batch,
        alpha_main: float,
        alpha_streams: torch.Tensor,
    ):
        self.target, self.speculator, self.batch = target, speculator, batch
        self.alpha_main, self.alpha_streams = alpha_main, alpha_streams
        self.labels = future_tokens(batch, speculator.num_streams)
        self.num_rows = mean_over_processes((self.labels.next_tokens != NO_LABEL).sum())
        self.num_tokens = mean_over_processes((self.labels.tokens != NO_LABEL).sum((0, 1)))
        self.num_tokens = self.num_tokens.clamp(min=1)

    def sums(
        self, columns: slice, main: torch.Tensor | None, early: torch.Tensor, streams: torch.Tensor
    ) -> Sums:
        """main, early: (B, P, D) main rows after the last layer (None where they are not trained)
        and before the pruning layer; streams: (B, P * gamma, D)."""
        next_tokens = self.labels.next_tokens[:, columns]
        used = next_tokens != NO_LABEL
        tokens = self.labels.tokens[:, columns][used]
        known = tokens != NO_LABEL
        streams = streams.unflatten(1, (-1, self.speculator.num_streams))[used][known]
        parents = torch.cat([next_tokens[used][:, None], tokens[:, :-1]], dim=1)[known]
        row, place = known.nonzero(as_tuple=True)
        labels = tokens[known]
        losses, guesses = self._head_loss(streams, labels)
        of_pairs = torch.zeros_like(losses)
        if self.speculator.scores_pairs:
            texts = self.batch.ids[used.nonzero()[:, 0]][row]
            lengths = self.labels.positions[:, columns][used][row] + 2
            of_pairs, guesses = self._pair_loss(streams, labels, place, parents, texts, lengths)
        per_stream = losses.new_zeros(self.speculator.num_streams)
        early = early[used].detach()
        pruning = self._head_loss(early + self.speculator.pruning(early), next_tokens[used])[0]
        return Sums(
            losses.new_zeros(()) if main is None
            else self._head_loss(main[used], next_tokens[used])[0].sum(),
            pruning.sum(),
            per_stream.index_add(0, place, losses),
            per_stream.index_add(0, place, of_pairs),
            per_stream.index_add(0, place, (guesses == labels).to(losses.dtype)),
        )  # fmt: skip

    def _pair_loss(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses and guesses of (M, D) streams with (M,) labels, their scores of pairs added.

        The other tensors, of M rows each, are for `add_pair_scores`. All logits of some rows at a
        time, computed again in the backward pass.
        """
        rows = max(1, PAIR_LOGITS // self.target.vocab_size)
        if len(tensors[0]) <= rows:
            return self._pair_losses(*tensors)
        parts = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
        results = [checkpoint(self._pair_losses, *part, use_reentrant=False) for part in parts]
        losses, guesses = zip(*results, strict=True)
        return torch.cat(losses), torch.cat(guesses)

    def _pair_losses(self, streams, labels, *pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with all logits at once."""
        with torch.no_grad():
            logits = self.target.logits(streams)
        logits = self.speculator.add_pair_scores(self.target, logits, *pairs)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(-1)

    def _head_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> tuple:
        return head_loss(self.target.head, self.target.norm(hidden), labels)

    def total(self, sums: Sums) -> torch.Tensor:
        """Eq. 6 with means in place of sums, so that it does not depend on the batch's size."""
        streams = (self.alpha_streams * (sums.streams + sums.pairs) / self.num_tokens).sum()
        return (self.alpha_main * sums.main + sums.pruning) / self.num_rows + streams

    def losses(self, total: torch.Tensor, sums: Sums) -> StreamLosses:
        return StreamLosses(
            total,
            sums.main / self.num_rows,
            sums.pruning / self.num_rows,
            sums.streams / self.num_tokens,
            sums.pairs / self.num_tokens,
            sums.hits / self.num_tokens,
        )
