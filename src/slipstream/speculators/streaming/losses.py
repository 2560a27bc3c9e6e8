"""What the rows of a batch, or of a segment of it, come to: the losses of Eq. 6.

How rows come about, all at once or segment by segment, is `segments.py`'s business.
"""

from typing import NamedTuple

import torch

from slipstream.core.processes import mean_over_processes
from slipstream.speculators.base import Batch
from slipstream.speculators.losses import (
    NO_LABEL,
    cross_entropy,
    future_tokens,
    head_loss,
    in_slices,
)
from slipstream.speculators.streaming.pairs import pair_tables
from slipstream.speculators.streaming.steps import StreamSteps
from slipstream.targets.target import Target


class StreamLosses(NamedTuple):
    """Means over the tokens of a batch, or a segment's share of them. main, pruning: losses of the
    main rows and of the pruning head; streams, pairs: (gamma,) losses of each stream without and
    with its scores of pairs; accuracies: (gamma,) right guesses; total: the weighted sum of Eq. 6
    plus the losses of the pruning head and of the scores of pairs; it alone carries gradients.

    Scores of pairs learn on top of the streams, which stay as they are: a stream that relied on its
    parent would be no good at naming candidates.
    """

    total: torch.Tensor
    main: torch.Tensor
    pruning: torch.Tensor
    streams: torch.Tensor
    pairs: torch.Tensor
    accuracies: torch.Tensor

    def plus(self, other: "StreamLosses") -> "StreamLosses":
        """The share of both segments."""
        return StreamLosses(*map(torch.add, self, other))


class BatchLosses:
    """One batch with its labels (of `least` positions or more), and what a segment of it needs to
    become a loss.

    Means, not the sums of Eq. 6, so that a loss does not depend on the batch's size.
    """

    def __init__(
        self,
        target: Target,
        speculator: StreamSteps,
        batch: Batch,
        alpha_main: float,
        alpha_streams: torch.Tensor,
        least: int = 1,
    ):
        self.target, self.speculator, self.batch = target, speculator, batch
        self.alpha_main, self.alpha_streams = alpha_main, alpha_streams
        self.labels = future_tokens(batch, speculator.num_streams, least)
        self.num_rows = mean_over_processes((self.labels.next_tokens != NO_LABEL).sum())
        self.num_tokens = mean_over_processes((self.labels.tokens != NO_LABEL).sum((0, 1)))
        self.num_tokens = self.num_tokens.clamp(min=1)
        self.tables = pair_tables(target, speculator.transitions, speculator.copying)

    def of_segment(
        self, columns: slice, main: torch.Tensor | None, early: torch.Tensor, streams: torch.Tensor
    ) -> StreamLosses:
        """main, early: (B, P, D) main rows after the last layer (None where they are not trained)
        and before the pruning layer; streams: (B, P * gamma, D)."""
        next_tokens = self.labels.next_tokens[:, columns]
        used = next_tokens != NO_LABEL
        tokens = self.labels.tokens[:, columns][used]
        known = tokens != NO_LABEL
        streams = streams.unflatten(1, (-1, self.speculator.num_streams))[used][known]
        row, stream = known.nonzero(as_tuple=True)
        labels = tokens[known]
        parents = torch.cat([next_tokens[used][:, None], tokens[:, :-1]], dim=1)[known]
        lengths = self.labels.positions[:, columns][used][row] + 2
        sample = used.nonzero()[row, 0]
        rows = self.target.norm(streams), labels, stream, parents, sample, lengths
        losses, of_pairs, guesses = in_slices(self._of_slice, self.target.vocab_size, *rows)
        hits = (guesses == labels).to(losses.dtype)
        per_stream = losses.new_zeros(self.speculator.num_streams)
        losses, of_pairs, accuracies = (
            per_stream.index_add(0, stream, each) / self.num_tokens
            for each in (losses, of_pairs, hits)
        )
        early = self.speculator.early_exit(early[used].detach())
        pruning = self._head_loss(early, next_tokens[used])[0].sum() / self.num_rows
        of_main = losses.new_zeros(())
        if main is not None:
            of_main = self._head_loss(main[used], next_tokens[used])[0].sum() / self.num_rows
        total = self.alpha_main * of_main + pruning
        total = total + (self.alpha_streams * (losses + of_pairs)).sum()
        parts = of_main, pruning, losses, of_pairs, accuracies
        return StreamLosses(total, *(part.detach() for part in parts))

    def _of_slice(
        self, normed: torch.Tensor, labels: torch.Tensor, *told: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Losses of (M, D) streams after the final norm, theirs with scores of pairs (0 where there
        are none), and the guesses, (M,) each. told: what `CopyScores.add_to` takes, in place of the
        texts (M,) rows of the batch."""
        logits, speculator = self.target.logits_of_normed(normed), self.speculator
        losses, paired = cross_entropy(logits, labels), logits.detach()
        if not speculator.scores_pairs:
            return losses, torch.zeros_like(losses), paired.argmax(-1)
        streams, parents, samples, lengths = told
        if speculator.transitions is not None:
            paired = speculator.transitions.add_to(paired, self.target, parents, self.tables[0])
        if speculator.copying is not None:
            of_tokens = (table.squeeze(1) for table in self.tables[-2:])
            known = streams, parents, self.batch.ids[samples], lengths
            paired = speculator.copying.add_to(paired, *of_tokens, *known)
        return losses, cross_entropy(paired, labels), paired.detach().argmax(-1)

    def _head_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> tuple:
        return head_loss(self.target.head, self.target.norm(hidden), labels)
