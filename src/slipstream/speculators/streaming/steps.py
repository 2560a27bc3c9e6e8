"""The parts of streams and their step functions, which serve training and decoding alike.

Paper: section 2, Eqs. 1 to 4; what streams may know of the root, and scores of pairs of tokens, are
additions of this project. Nothing here knows trees, drafts, losses or how the target is changed.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.core.cache import StepCache
from slipstream.core.device import has_room_for
from slipstream.core.masks import causal_mask, own_streams, stream_mask
from slipstream.core.settings import set_to
from slipstream.speculators.base import DraftingSpeculator
from slipstream.speculators.streaming.adapters import LowRank, StreamAdapters, rotating
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.pairs import CopyScores, Transitions, normed_embeddings
from slipstream.targets.attention import LIMIT
from slipstream.targets.quantized import is_quantized
from slipstream.targets.rows import Rows, rows_at
from slipstream.targets.target import Target


class StreamSteps(DraftingSpeculator):
    """gamma streams in the top N_s layers of a target: `add_streams` to the rows of a forward, or
    `run_streams` after it."""

    config: StreamingConfig

    def __init__(self, target: Target, config: StreamingConfig):
        super().__init__()
        config.check_against(target)
        self.config, self.num_streams = config, config.num_streams
        width, self.last_position = target.hidden_size, target.max_positions - 1
        self.first_layer = self.pruning_layer = target.num_layers - config.num_msa_layers
        if config.pruning_layer is not None:
            self.pruning_layer = config.pruning_layer
        self.embeddings = self.initialisation = self.root = self.adapters = None
        self.transitions = self.copying = None
        if not config.value_rotation:
            self.embeddings = nn.Parameter(0.02 * torch.randn(self.num_streams, width))
        if rank := config.initialisation_rank:
            self.initialisation = LowRank(width, width, rank)
            nn.init.normal_(self.initialisation.up, std=rank**-0.5)
        if rank := config.root_rank:
            self.root = LowRank(target.embedding_size, width, rank)
        if rank := config.adapter_rank:
            skip_mlp = config.mlp == "adapter"
            self.adapters = StreamAdapters(target, self.msa_layers(target), rank, skip_mlp)
        self.pruning = LowRank(width, width, config.pruning_rank)
        if rank := config.transition_rank:
            self.transitions = Transitions(target.embedding_size, rank)
        if config.copy_scores:
            self.copying = CopyScores(target.embedding_size, self.num_streams)

    def msa_layers(self, target: Target) -> range:
        return range(self.first_layer, target.num_layers)

    def streams_of(
        self, hidden: torch.Tensor, root_embeddings: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Eq. 4: main rows (B, P, D) at layer L - N_s -> stream rows (B, P * gamma, D).

        root_embeddings: (B, P, E) of the tokens after the main rows, None where unknown.
        """
        if self.initialisation is not None:
            hidden = self.initialisation(hidden)
        if self.root is not None and root_embeddings is not None:
            hidden = hidden + self.root(root_embeddings)
        streams = hidden.unsqueeze(2).expand(-1, -1, self.num_streams, -1)
        if self.embeddings is not None:
            streams = streams + self.embeddings[: self.num_streams].to(hidden.dtype)
        return streams.flatten(1, 2)

    def positions_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Rotary positions (B, P) of main rows -> (B, P * gamma) of their streams."""
        shift = torch.arange(1, self.num_streams + 1, device=positions.device)
        if self.config.stream_positions == "same":
            shift = torch.zeros_like(shift)
        return (positions.unsqueeze(-1) + shift).flatten(1).clamp(max=self.last_position)

    def add_streams(self, target: Target, rows: Rows, chosen: torch.Tensor) -> Rows:
        """Append the streams of the `chosen` main rows, (B, P) with -1 for none.

        Streams see what their main row sees and one another (Eq. 2). Main rows see the main stream
        alone (lossless, Eq. 1), or also the streams of their own position (shared, Eq. 3).
        """
        batch, mask = len(rows.hidden), rows.mask
        if mask is None:
            mask = causal_mask(rows.hidden.shape[1], rows.hidden.device)[None, None]
        positions, mask = rows.positions.expand(batch, -1), mask.expand(batch, -1, -1, -1)
        given = rows.hidden, positions, mask, chosen
        hidden, positions, mask = target.replayed(self._added, (), *given, often=rows.repeats)
        return replace(
            rows,
            hidden=hidden,
            positions=positions,
            mask=mask,
            num_stream_rows=chosen.shape[1] * self.num_streams,
            owners=chosen,
            # What streams are limited to is looked up in the rows, which replays of single spans of
            # layers would not see.
            repeats=rows.repeats and not self.config.attended_tokens,
            acting=self,
        )

    def _added(self, hidden, positions, mask, chosen) -> tuple[torch.Tensor, ...]:
        """The hidden states, positions and mask of rows, with those of `add_streams` after them."""
        index = chosen.clamp(min=0)
        owners = rows_at(hidden, index)
        lines = mask.gather(2, index[:, None, :, None].expand(-1, 1, -1, mask.shape[3]))
        streams, shifted = self.streams_of(owners), self.positions_of(positions.gather(1, index))
        if self.config.mode == "shared":
            own = own_streams(chosen, hidden.shape[1], self.num_streams).unsqueeze(1)
        else:
            own = mask.new_zeros(*mask.shape[:3], streams.shape[1])
        main, streams_see = torch.cat([mask, own], -1), stream_mask(lines, self.num_streams)
        return (
            torch.cat([hidden, streams], dim=1),
            torch.cat([positions, shifted], dim=1),
            torch.cat([main, streams_see], dim=2),
        )

    def run_streams(
        self,
        target: Target,
        hidden: torch.Tensor,
        roots: torch.Tensor,
        positions: torch.Tensor,
        main_mask: torch.Tensor,
        cache: StepCache,
        merged: nn.ModuleList | None = None,
    ) -> torch.Tensor:
        """Streams of P main rows alone, over cached keys and values (training, deferred schedule).

        hidden: (B, P, D) of the main rows before layer L - N_s; roots: (B, P), the tokens after
        them, negative where unknown; positions: (B, P) of the main rows; main_mask: (B, 1, P, K),
        which of the K cached slots each main row sees (itself included); merged: the adapters'
        `merged_layers`, to run instead of the target's layers with hooks.
        Returns (B, P * gamma, D), before the final norm.
        """
        embeddings, main = None, 0
        if self.root is not None:
            known = (roots >= 0).unsqueeze(-1)
            embeddings = normed_embeddings(target, roots.clamp(min=0)) * known
        streams, shifted = self.streams_of(hidden, embeddings), self.positions_of(positions)
        mask, slots = stream_mask(main_mask, self.num_streams), main_mask.shape[-1]
        rows = Rows(streams, shifted, mask, streams.shape[1], repeats=isinstance(cache, StepCache))
        if self.config.attended_tokens:  # which the main rows know: they are seen by nothing
            batch, main, _ = hidden.shape
            seen = F.pad(main_mask, (0, main + streams.shape[1]), value=False)
            unseen = mask.new_zeros(*mask.shape[:3], main)
            own = torch.cat([mask[..., :slots], unseen, mask[..., slots:]], dim=-1)
            rows.hidden = torch.cat([hidden, streams], dim=1)
            rows.positions = torch.cat([positions, shifted], dim=1)
            rows.mask, rows.repeats = torch.cat([seen, own], dim=2), False
            rows.owners = torch.arange(main, device=hidden.device).expand(batch, -1)
        rows.acting = None if merged is not None and not self.config.value_rotation else self
        layers = list(target.family.layers)[self.first_layer :] if merged is None else merged
        with self.acting_on(target, rows, merged) if rows.acting else nullcontext():
            hidden = target.run_modules(layers, rows, cache).hidden
        return hidden[:, main:] if main else hidden

    @contextmanager
    def acting_on(
        self, target: Target, rows: Rows, merged: nn.ModuleList | None = None
    ) -> Iterator[None]:
        """Within, the stream rows of `rows` run as streams: adapted (which `merged` layers do
        themselves), rotated, limited."""
        with ExitStack() as contexts:
            if self.adapters is not None and merged is None:
                contexts.enter_context(self.adapters.active(target, rows))
            if step := self.config.value_rotation:
                layers = merged or target.family.layers[self.first_layer :]
                contexts.enter_context(rotating(target, layers, rows, self.num_streams, step))
            if self.config.attended_tokens and rows.num_stream_rows:
                contexts.enter_context(set_to(LIMIT, (rows, self.config.attended_tokens)))
            yield

    def merged_layers(self, target: Target) -> nn.ModuleList | None:
        """Layers for `run_streams` that compute the adapters on the way, where that is possible.

        On a CPU they save a sixth of a deferred step at 14 M parameters, and more at 1.1 B, where
        they have 8 bits; on an H200 7 % at 8 B, where hooks are not compiled. They are copies,
        which a GPU must have room for.
        """
        layers = target.family.layers[self.first_layer :]
        if not has_room_for(sum(p.nbytes for p in layers.parameters()), target.device):
            return None
        # a device map's, or split over processes
        placed = any(hasattr(module, "_hf_hook") for module in layers.modules())
        placed = placed or any(hasattr(tensor, "full_tensor") for tensor in layers.parameters())
        if self.adapters is None or self.config.attended_tokens or is_quantized(layers) or placed:
            return None
        return self.adapters.merged_layers(target)

    @property
    def scores_pairs(self) -> bool:
        return self.transitions is not None or self.copying is not None

    def early_exit(self, hidden: torch.Tensor) -> torch.Tensor:
        """Pruning head: (..., D) at the pruning layer -> (..., D), from which the target's own LM
        head tells the next tokens."""
        return hidden + self.pruning(hidden)


class AddedStreams:
    """A visitor before the MSA layers: adds the streams of the `chosen` rows, (B, P) with -1 for
    none; None for all rows that may carry a draft."""

    replays = True

    def __init__(self, target: Target, speculator: StreamSteps, chosen: torch.Tensor | None = None):
        self.target, self.speculator, self.chosen = target, speculator, chosen
        self.layer = speculator.first_layer

    @contextmanager
    def visit(self, rows: Rows) -> Iterator[Rows]:
        chosen = rows.carriers if self.chosen is None else self.chosen
        if chosen is None:
            yield rows
            return
        rows = self.speculator.add_streams(self.target, rows, chosen)
        with self.speculator.acting_on(self.target, rows):
            yield rows
