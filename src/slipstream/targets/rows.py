"""Rows: positions on their way through the layers, and the visitors that look at them there.

A *row* is one position in a forward: a token with its position and its line of the attention mask.
Node rows come first; between two layers a `LayerVisitor` may drop some (pruning) or add others
(streams), which is how a drafter takes part in the verifying forward without the engine knowing it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from slipstream.core.masks import window_mask
from slipstream.core.trees import Trees


@dataclass
class Rows:
    """hidden: (B, R, D); positions: (B, R); mask: (B, 1, R, K) boolean, or None (plain causal over
    an empty cache; without a visitor also a single row that sees everything). The last
    `num_stream_rows` rows were added by a visitor, equally many for each of `owners`, (B, P)
    indices of node rows, -1 for none.

    trees: the trees whose nodes the node rows are, None for a prompt; last: (B,), the last row of
    each prompt if the prompts end with these rows, else None. kept: (B, N) which node rows of the
    forward are still there, -1 for padding, None for all; kept_from: the first layer that ran
    without the others. repeats: whether rows of these shapes come in every step, so that their
    layers may run compiled; acting: what changes how layers treat the stream rows, if anything
    does. readout: a function that is called on the rows after the next span of layers (and captured
    with it); outcome: its result, tensors whose first dimension is B. prepared: positions and mask,
    with the rotary values and masks that a span of layers made of them, for the next one. seen: the
    rows at a `HiddenTap`, by its layer.
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None
    num_stream_rows: int = 0
    owners: torch.Tensor | None = None
    trees: Trees | None = None
    last: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    kept_from: int = 0
    repeats: bool = False
    acting: object = None
    readout: Callable[["Rows"], object] | None = None
    outcome: object = None
    prepared: tuple = (None, None)
    seen: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        return self.hidden.shape[1] - self.num_stream_rows

    @property
    def carriers(self) -> torch.Tensor | None:
        """(B, P) node rows after which a draft may begin, -1 for padding: all nodes of trees, of
        prompts the last row; None where there is none."""
        if self.trees is None:
            return None if self.last is None else self.last[:, None]
        nodes = torch.arange(self.trees.width, device=self.hidden.device)
        return nodes.masked_fill(~self.trees.real, -1)

    def read_out(self) -> None:
        """Let `readout` make what it does of the rows as they are now."""
        self.outcome = None if self.readout is None else self.readout(self)

    def mask_within(self, window: int | None, committed: int) -> torch.Tensor | None:
        """The mask in layers whose rows look back over `window` positions, their own included.

        committed: slots before the rows. As long as all slots fit the window, nothing changes.
        """
        slots = committed + self.hidden.shape[1]
        if window is None or slots <= window:
            return self.mask
        mask = self.mask
        if mask is None:
            rows = slots - committed, slots
            seen = torch.ones(rows, dtype=torch.bool, device=self.hidden.device)
            mask = seen.tril(committed)[None, None]
        return mask & window_mask(committed, self.positions, window)

    def keep(self, nodes: torch.Tensor, layer: int) -> None:
        """Let only these (B, M) node rows (-1 for padding) and their streams (of all nodes or none)
        go on, from `layer` on; they see one another and all committed tokens as before, and nobody
        sees padding."""
        count, streams = self.num_nodes, self.num_stream_rows // self.num_nodes
        index = nodes.clamp(min=0)
        own = torch.arange(streams, device=nodes.device)
        rows = torch.cat([index, (count + index[..., None] * streams + own).flatten(1)], 1)
        committed = self.mask.shape[-1] - self.hidden.shape[1]
        before = torch.arange(committed, device=nodes.device).expand(len(nodes), -1)
        columns = torch.cat([before, committed + rows], 1)[:, None, None]
        mask = self.mask.gather(2, rows[:, None, :, None].expand(-1, 1, -1, self.mask.shape[-1]))
        mask = mask.gather(3, columns.expand(-1, 1, rows.shape[1], -1))
        real = torch.cat([nodes >= 0, (nodes >= 0).repeat_interleave(streams, 1)], 1)
        self.mask = mask & torch.nn.functional.pad(real, (committed, 0), value=True)[:, None, None]
        self.hidden = rows_at(self.hidden, rows)
        self.positions = self.positions.gather(1, rows)
        self.num_stream_rows = streams * nodes.shape[1]
        if self.owners is not None:
            self.owners = torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
        if self.trees is not None:
            self.trees = self.trees.select(nodes)
        self.kept, self.kept_from = nodes, layer


def rows_at(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(B, R, D) values at (B, P) places among the rows, (B, P, D)."""
    return values.gather(1, places[..., None].expand(-1, -1, values.shape[-1]))


class LayerVisitor(Protocol):
    """Something that looks at, drops or adds rows before layer `layer` of a forward. replays:
    whether it computes with tensors alone, keeps nothing, and may be part of a graph."""

    layer: int
    replays: bool

    def visit(self, rows: Rows) -> AbstractContextManager[Rows]:
        """The rows that go on; the context stays open while the layers above run."""


@dataclass(frozen=True)
class HiddenTap:
    """A visitor that changes nothing: `rows.seen` has the rows before its layer, (B, R, D)."""

    layer: int
    replays = True

    def visit(self, rows: Rows) -> AbstractContextManager[Rows]:
        rows.seen[self.layer] = rows.hidden
        return nullcontext(rows)
