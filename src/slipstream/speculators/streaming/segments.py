"""The losses of a batch: streams of the completion, one segment of it at a time (appendix I), as
docs/speculative-streaming.md tells for both modes.

Only the streams of the segment in work exist; those of prompt positions before the last never do.
`num_segments=None` gives the dense form, everything at once: the plain reference.
"""

from collections.abc import Iterator
from functools import partial, reduce

import torch
from torch.utils.checkpoint import checkpoint

from slipstream.core.cache import TrainingCache
from slipstream.core.masks import causal_mask
from slipstream.speculators.base import Batch, causal_rows
from slipstream.speculators.losses import NO_LABEL
from slipstream.speculators.streaming.losses import BatchLosses, StreamLosses
from slipstream.speculators.streaming.steps import AddedStreams, StreamSteps
from slipstream.targets.rows import HiddenTap, rows_at
from slipstream.targets.target import Target


def lossless_losses(
    target: Target,
    speculator: StreamSteps,
    batch: Batch,
    alpha_streams: torch.Tensor,
    num_segments: int | None,
    unknown_roots: torch.Tensor | None = None,
) -> StreamLosses:
    """Losses of the streams over a frozen target; num_segments=None: the whole completion at once.

    unknown_roots: (B,) sequences whose streams are not told the root (`root_rank`), None for none.
    """
    # Of every batch as many segments: processes that share the layers run them equally often.
    work = BatchLosses(target, speculator, batch, 0.0, alpha_streams, num_segments or 1)
    cache = TrainingCache(target.num_layers, speculator.first_layer)
    start, early = HiddenTap(speculator.first_layer), HiddenTap(speculator.pruning_layer)
    with torch.no_grad():
        seen = causal_rows(target, batch.ids, cache, [start, early]).seen
    cache.settle()
    cache.keep = 0
    roots = work.labels.next_tokens
    if unknown_roots is not None:
        roots = roots.masked_fill(unknown_roots.to(roots.device)[:, None], NO_LABEL)
    causal = causal_mask(batch.ids.shape[1], batch.ids.device)

    def losses_of(columns: slice) -> StreamLosses:
        here = work.labels.positions[:, columns]
        cache.visible = int(here.max()) + 1
        hidden = rows_at(seen[start.layer], here)
        sees = causal[here, : cache.visible].unsqueeze(1)
        streams = speculator.run_streams(target, hidden, roots[:, columns], here, sees, cache)
        return work.of_segment(columns, None, rows_at(seen[early.layer], here), streams)

    segments = work.labels.segments(num_segments)
    if num_segments is None or not torch.is_grad_enabled():
        return reduce(StreamLosses.plus, map(losses_of, segments))
    made = *speculator.parameters(), *work.tables
    # Each segment's gradients, which are taken before the next one begins, end at the tables of
    # pair scores, which all of them share.
    work.tables = tuple(table.detach().requires_grad_() for table in work.tables)
    used = *speculator.parameters(), *work.tables
    done, sums = [], [torch.zeros_like(tensor) for tensor in used]
    for columns in segments:
        losses = losses_of(columns)
        gradients = torch.autograd.grad(losses.total, used, materialize_grads=True)
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient
        done.append(losses._replace(total=losses.total.detach()))
    losses = reduce(StreamLosses.plus, done)
    # Each adds nothing to the total but its tensor's gradient.
    carriers = [((t - t.detach()) * given).sum() for t, given in zip(made, sums, strict=True)]
    return losses._replace(total=losses.total + torch.stack(carriers).sum())


def shared_losses(
    target: Target,
    speculator: StreamSteps,
    batch: Batch,
    alpha_main: float,
    alpha_streams: torch.Tensor,
    num_segments: int | None,
) -> StreamLosses:
    """Losses of main rows and streams; `target` carries the adapters that are trained."""
    work = BatchLosses(target, speculator, batch, alpha_main, alpha_streams)
    slots = [work.batch.ids[:, :0]]  # (B, R) positions of the rows kept so far, part by part
    past: list[torch.Tensor] = []  # their keys and values: 2 * L tensors a part
    done: list[StreamLosses] = []
    segments, first = work.labels.segments(num_segments), work.labels.positions[:, :1]
    if num_segments is None:  # in one part, the prompt included
        first = torch.zeros_like(first)
    for rows, chosen, columns in _parts(work, segments, first):
        run = partial(_run_part, work, rows, chosen, columns, torch.cat(slots, dim=1))
        slots.append(rows)
        if num_segments is not None:
            run = partial(checkpoint, run, use_reentrant=False)
        losses, made = run(*past)
        past += made
        if losses is not None:
            done.append(losses)
    return reduce(StreamLosses.plus, done)


_Part = tuple[torch.Tensor, torch.Tensor | None, slice | None]
"""rows (B, R), positions in the sample or -1 for none; chosen (B, P), which of those rows carry
streams, -1 for none; and the columns of the labels they stand for."""


def _parts(work: BatchLosses, segments: list[slice], first: torch.Tensor) -> Iterator[_Part]:
    """Rows before `first` (B, 1), without streams, in parts of as many rows as a segment has with
    its streams; then the segments, with the rows between their completions."""
    positions, usable = work.labels.positions, work.labels.next_tokens != NO_LABEL
    device, width = positions.device, segments[0].stop * (work.speculator.num_streams + 1)
    for start in range(0, int(first.max()), width):
        rows = torch.arange(start, min(start + width, int(first.max())), device=device)
        yield torch.where(rows < first, rows, -1), None, None
    for columns in segments:
        here, chosen = usable[:, columns], positions[:, columns]
        last = torch.where(here, chosen, first - 1).amax(1, keepdim=True)
        rows = first + torch.arange(int((last - first).max()) + 1, device=device)
        yield torch.where(rows <= last, rows, -1), torch.where(here, chosen - first, -1), columns
        first = last + 1


def _run_part(
    work: BatchLosses,
    rows: torch.Tensor,
    chosen: torch.Tensor | None,
    columns: slice | None,
    earlier: torch.Tensor,
    *past: torch.Tensor,
) -> tuple[StreamLosses | None, list[torch.Tensor]]:
    """One part through the whole target: its losses (if it carries streams), and its own keys and
    values, layer by layer. earlier: (B, S) positions of the rows of all parts before it, -1 for
    none; past: the same tensors of these parts."""
    target, speculator = work.target, work.speculator
    cache, count = TrainingCache(target.num_layers), rows.shape[1]
    here, known = rows.clamp(min=0), (earlier >= 0).sum(1)
    if past:
        # In the order of their positions, as layers with a window take them to be.
        order = earlier.masked_fill(earlier < 0, earlier.shape[1]).argsort(1)
        order = order[:, None, : int(known.max()), None]
        for layer in range(target.num_layers):
            both = (torch.cat(past[2 * layer + k :: 2 * target.num_layers], 2) for k in (0, 1))
            cache.kept[layer] = tuple(side.take_along_dim(order, 2) for side in both)
    cache.keep = count
    slots = torch.arange(cache.slots, device=rows.device)
    sees = (slots < known[:, None])[:, None].expand(-1, count, -1)
    own = (rows[:, None] >= 0) & (rows[:, None] <= here[:, :, None])
    own = own | torch.eye(count, dtype=torch.bool, device=rows.device)
    early = HiddenTap(speculator.pruning_layer)
    visitors = [early] if chosen is None else [early, AddedStreams(target, speculator, chosen)]
    ids, mask = work.batch.ids.gather(1, here), torch.cat([sees, own], -1)[:, None]
    run = target.forward(ids, here, mask, cache, visitors)
    made = [tensor for pair in cache.made for tensor in pair]
    if chosen is None:
        return None, made
    index = chosen.clamp(min=0)
    main, before = rows_at(run.hidden[:, :count], index), rows_at(run.seen[early.layer], index)
    return work.of_segment(columns, main, before, run.hidden[:, count:]), made
