"""The losses of a batch: streams of the completion, one segment of it at a time (appendix I).

Streams multiply the rows of the MSA layers by gamma + 1, and with them the memory that training
needs. So a completion is divided into segments, and only the streams of the segment in work exist;
those of prompt positions before the last never do.

Lossless: the main rows run once, without gradients; then the streams of each segment run over
their keys and values, and the gradients of a segment are taken before the next one begins. Shared:
main rows learn too and see their streams, so a segment holds both; later segments reach it through
its keys and values alone, and all else is computed again in the backward pass. `num_segments=None`
gives the dense form of both, everything at once: the plain reference.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.core.cache import TrainingCache
from slipstream.core.masks import causal_mask
from slipstream.data.batches import Batch
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.target import Rows, Target, Watch
from slipstream.training.head_loss import head_loss
from slipstream.training.stream_labels import NO_LABEL, stream_labels

PAIR_LOGITS = 2**24
"""So many logits with scores of pairs are held at a time."""


@dataclass
class Sums:
    """Sums over the tokens of a segment: losses of the main rows, of the pruning head, of each
    stream (gamma,) and of each with its scores of pairs (gamma,); and right guesses (gamma,)."""

    main: torch.Tensor
    pruning: torch.Tensor
    streams: torch.Tensor
    pairs: torch.Tensor
    hits: torch.Tensor

    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.main, self.pruning, self.streams, self.pairs, self.hits

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(a + b for a, b in zip(self.parts(), other.parts(), strict=True)))

    def detach(self) -> "Sums":
        return Sums(*(part.detach() for part in self.parts()))


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


class _Batch:
    """One batch with its labels, and what a segment of it needs to become a loss."""

    def __init__(
        self,
        target: Target,
        speculator: StreamingSpeculator,
        batch: Batch,
        alpha_main: float,
        alpha_streams: torch.Tensor,
    ):
        self.target, self.speculator, self.batch = target, speculator, batch
        self.alpha_main, self.alpha_streams = alpha_main, alpha_streams
        self.labels = stream_labels(batch, speculator.num_streams)
        self.num_rows = (self.labels.next_tokens != NO_LABEL).sum()
        self.num_tokens = (self.labels.tokens != NO_LABEL).sum((0, 1)).clamp(min=1)

    def segments(self, num_segments: int | None) -> list[slice]:
        """The columns of the labels, in `num_segments` parts."""
        count = self.labels.positions.shape[1]
        width = -(-count // (num_segments or 1))
        return [slice(start, start + width) for start in range(0, count, width)]

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


def lossless_losses(
    target: Target,
    speculator: StreamingSpeculator,
    batch: Batch,
    alpha_streams: torch.Tensor,
    num_segments: int | None,
    unknown_roots: torch.Tensor | None = None,
) -> StreamLosses:
    """Losses of the streams over a frozen target; None for all of the completion at once.

    unknown_roots: (B,) sequences whose streams are not told the root (`root_rank`), None for none.
    """
    work = _Batch(target, speculator, batch, 0.0, alpha_streams)
    cache = TrainingCache(target.num_layers)
    start, early = Watch(speculator.first_layer), Watch(speculator.pruning_layer)
    length, positions = batch.ids.shape[1], work.labels.positions
    everywhere = torch.arange(length, device=batch.ids.device).expand_as(batch.ids)
    with torch.no_grad():
        target.forward(batch.ids, everywhere, None, cache, [start, early])
    cache.keep = 0
    roots = work.labels.next_tokens
    if unknown_roots is not None:
        roots = roots.masked_fill(unknown_roots.to(roots.device)[:, None], NO_LABEL)
    causal = causal_mask(length, batch.ids.device)

    def segment(columns: slice) -> Sums:
        here = positions[:, columns]
        cache.visible = int(here.max()) + 1
        index = here.unsqueeze(-1).expand(-1, -1, target.hidden_size)
        hidden = start.hidden.gather(1, index)
        sees = causal[here, : cache.visible].unsqueeze(1)
        streams = speculator.run_streams(target, hidden, roots[:, columns], here, sees, cache)
        return work.sums(columns, None, early.hidden.gather(1, index), streams)

    return _accumulated(work, segment, list(speculator.parameters()), num_segments)


def shared_losses(
    target: Target,
    speculator: StreamingSpeculator,
    batch: Batch,
    alpha_main: float,
    alpha_streams: torch.Tensor,
    num_segments: int | None,
) -> StreamLosses:
    """Losses of main rows and streams; `target` carries the adapters that are trained."""
    work = _Batch(target, speculator, batch, alpha_main, alpha_streams)
    positions = work.labels.positions
    usable = work.labels.next_tokens != NO_LABEL
    slots: list[torch.Tensor] = []  # (B, R) positions of the rows kept so far, part by part
    past: list[torch.Tensor] = []  # their keys and values: 2 * L tensors a part
    sums: Sums | None = None
    if num_segments is None:
        parts = _whole(positions, usable)
    else:
        parts = _parts(positions, usable, work.segments(num_segments), speculator.num_streams)
    for rows, chosen, columns in parts:
        slots.append(rows)
        run = partial(_run_part, work, rows, chosen, columns, torch.cat(slots, dim=1))
        result = run(*past) if num_segments is None else checkpoint(run, *past, use_reentrant=False)
        past += result[len(result) - 2 * target.num_layers :]
        if columns is not None:
            part = Sums(*result[: len(fields(Sums))])
            sums = part if sums is None else sums + part
    return work.losses(work.total(sums), sums.detach())


_Part = tuple[torch.Tensor, torch.Tensor | None, slice | None]
"""rows (B, R), positions in the sample or -1 for none; chosen (B, P), which of those rows carry
streams, -1 for none; and the columns of the labels they stand for."""


def _whole(positions: torch.Tensor, usable: torch.Tensor) -> Iterator[_Part]:
    """A batch in one part."""
    last = torch.where(usable, positions, -1).amax(1, keepdim=True)
    rows = torch.arange(int(last.max()) + 1, device=positions.device).expand(len(last), -1)
    yield torch.where(rows <= last, rows, -1), torch.where(usable, positions, -1), slice(None)


def _parts(
    positions: torch.Tensor, usable: torch.Tensor, segments: list[slice], num_streams: int
) -> Iterator[_Part]:
    """Prompt rows without streams, in parts of as many rows as a segment has with its streams;
    then the segments."""
    if (positions.diff(dim=1) != 1)[usable[:, 1:]].any():
        raise ValueError("segments: the supervised tokens of a sample must be in one piece")
    device, first = positions.device, positions[:, :1]
    width = segments[0].stop * (num_streams + 1)
    for start in range(0, int(first.max()), width):
        rows = torch.arange(start, min(start + width, int(first.max())), device=device)
        yield torch.where(rows < first, rows, -1), None, None
    for columns in segments:
        here = usable[:, columns]
        places = torch.arange(here.shape[1], device=device)
        yield torch.where(here, positions[:, columns], -1), torch.where(here, places, -1), columns


def _run_part(
    work: _Batch,
    rows: torch.Tensor,
    chosen: torch.Tensor | None,
    columns: slice | None,
    slots: torch.Tensor,
    *past: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """One part through the whole target: its sums (if it carries streams), then its own keys and
    values, layer by layer. past: the same tensors of all parts before it."""
    target, speculator = work.target, work.speculator
    cache = TrainingCache(target.num_layers)
    for place in range(0, len(past), 2):
        cache.kept[place // 2 % target.num_layers].append((past[place], past[place + 1]))
    count = cache.keep = rows.shape[1]
    here = rows.clamp(min=0)
    mask = (slots[:, None] >= 0) & (slots[:, None] <= here[:, :, None])
    mask[:, :, -count:] |= torch.eye(count, dtype=torch.bool, device=rows.device)
    early = Watch(speculator.pruning_layer)
    visitors = [early] if chosen is None else [early, _Adding(target, speculator, chosen)]
    ids = work.batch.ids.gather(1, here)
    hidden = target.forward(ids, here, mask[:, None], cache, visitors).hidden
    made = tuple(tensor for kept in cache.kept for tensor in kept[-1])
    if chosen is None:
        return made
    index = chosen.clamp(min=0).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
    main, before = hidden[:, :count].gather(1, index), early.hidden.gather(1, index)
    return (*work.sums(columns, main, before, hidden[:, count:]).parts(), *made)


def _accumulated(
    work: _Batch,
    segment: Callable[[slice], Sums],
    parameters: list[torch.nn.Parameter],
    num_segments: int | None,
) -> StreamLosses:
    """Run the segments one after the other, each with its backward pass at once."""
    segments = work.segments(num_segments)
    if num_segments is None or not torch.is_grad_enabled():
        sums = segment(segments[0])
        for columns in segments[1:]:
            sums = sums + segment(columns)
        return work.losses(work.total(sums), sums.detach())
    done: list[Sums] = []

    def losses() -> Iterator[torch.Tensor]:
        for columns in segments:
            sums = segment(columns)
            done.append(sums.detach())
            yield work.total(sums)

    total = _SegmentedLoss.apply(losses, *parameters)
    return work.losses(total, sum(done[1:], done[0]))


class _SegmentedLoss(torch.autograd.Function):
    """The sum of losses whose gradients are taken one by one, in the forward pass."""

    @staticmethod
    def forward(ctx, losses, *parameters):
        total, gradients = 0.0, [torch.zeros_like(parameter) for parameter in parameters]
        with torch.enable_grad():
            for loss in losses():
                parts = torch.autograd.grad(loss, parameters, allow_unused=True)
                for gradient, part in zip(gradients, parts, strict=True):
                    if part is not None:
                        gradient += part
                total = total + loss.detach()
        ctx.gradients = gradients
        return total

    @staticmethod
    def backward(ctx, outer):
        return None, *(gradient * outer for gradient in ctx.gradients)


class _Adding:
    """A visitor that adds the streams of the `chosen` rows, (B, P) with -1 for none."""

    def __init__(self, target: Target, speculator: StreamingSpeculator, chosen: torch.Tensor):
        self.target, self.speculator, self.chosen = target, speculator, chosen
        self.layer = speculator.first_layer

    @contextmanager
    def visit(self, rows: Rows) -> Iterator[Rows]:
        rows = self.speculator.add_streams(rows, self.chosen)
        with self.speculator.acting_on(self.target, rows):
            yield rows
