"""StreamingSpeculator: the trained part of Speculative Streaming, lossless mode.

Stream embeddings P_j, the initialisation f_eta, adapters on stream rows and the pruning head. Its
two step functions, `add_streams` and `run_streams`, serve training and decoding alike. It knows
rows of a target, not trees, drafts or losses. Paper: section 2, Eqs. 2 and 4; what streams may
know of the root, and scores of token pairs, are additions of this project.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.core.cache import StepCache
from slipstream.core.masks import causal_mask, stream_mask
from slipstream.speculators.streaming.adapters import LowRank, StreamAdapters
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.pairs import CopyScores, Transitions, normed_embeddings
from slipstream.targets.target import Rows, Target


class StreamingSpeculator(nn.Module):
    """gamma streams in the top N_s layers of `target`.

    Raises `InputError` for a config the target cannot carry.
    """

    kind = "streaming"

    def __init__(self, target: Target, config: StreamingConfig):
        super().__init__()
        config.check_against(target)
        self.config = config
        width = target.hidden_size
        self.first_layer = target.num_layers - self.config.num_msa_layers
        self.num_streams = self.config.num_streams
        self.embeddings = nn.Parameter(torch.empty(self.num_streams, width))
        nn.init.normal_(self.embeddings, std=0.02)
        rank = self.config.initialisation_rank
        self.initialisation = LowRank(width, width, rank, random_up=True) if rank else None
        rank = self.config.root_rank
        self.root = LowRank(target.embedding_size, width, rank) if rank else None
        self.adapters = None
        if self.config.adapter_rank:
            self.adapters = StreamAdapters(
                target,
                self.config.num_msa_layers,
                self.config.adapter_rank,
                skip_mlp=self.config.mlp == "adapter",
            )
        self.pruning = LowRank(width, width, self.config.pruning_rank)
        rank = self.config.transition_rank
        self.transitions = Transitions(target.embedding_size, rank) if rank else None
        self.copying = None
        if self.config.copy_scores:
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
        streams = hidden.unsqueeze(2) + self.embeddings.to(hidden.dtype)
        return streams.flatten(1, 2)

    def positions_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Rotary positions (B, P) of main rows -> (B, P * gamma) of their streams."""
        shift = torch.zeros(self.num_streams, dtype=positions.dtype, device=positions.device)
        if self.config.stream_positions == "shifted":
            shift = torch.arange(1, self.num_streams + 1, device=positions.device)
        return (positions.unsqueeze(-1) + shift).flatten(1)

    def add_streams(self, rows: Rows, chosen: list[int]) -> Rows:
        """Append the streams of the `chosen` main rows (fused schedule, lossless: Eq. 1 and 2)."""
        mask = rows.mask
        if mask is None:
            mask = causal_mask(rows.hidden.shape[1], rows.hidden.device)[None, None]
        streams = self.streams_of(rows.hidden[:, chosen])
        own = stream_mask(mask[:, :, chosen], self.num_streams)
        main = F.pad(mask, (0, streams.shape[1]), value=False)
        return Rows(
            torch.cat([rows.hidden, streams], dim=1),
            torch.cat([rows.positions, self.positions_of(rows.positions[:, chosen])], dim=1),
            torch.cat([main, own], dim=2),
            rows.kept,
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
        `merged_layers`, to run instead of the target's layers with hooks. Returns
        (B, P * gamma, D), before the final norm.
        """
        embeddings = None
        if self.root is not None:
            embeddings = normed_embeddings(target, roots.clamp(min=0))
            embeddings = embeddings * (roots >= 0).unsqueeze(-1)
        rows = Rows(
            self.streams_of(hidden, embeddings),
            self.positions_of(positions),
            stream_mask(main_mask, self.num_streams),
        )
        if merged is not None:
            return target.run_modules(merged, rows, cache).hidden
        with self.acting_on(target, 0):
            return target.run_layers(self.msa_layers(target), rows, cache).hidden

    def acting_on(self, target: Target, first_row: int):
        """A context in which the adapters act on rows from `first_row` on."""
        return self.adapters.active(target, first_row) if self.adapters else nullcontext()

    def add_pair_scores(
        self,
        target: Target,
        logits: torch.Tensor,
        parents: torch.Tensor,
        texts: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """(M, gamma, V) logits of streams and what the tokens before theirs add to them.

        parents: (M, gamma) the token before each stream's; texts: (M, T) and lengths: (M,), the
        tokens known when the streams run, the root the last of them.
        """
        if self.transitions is not None:
            logits = logits + self.transitions(target, parents)
        if self.copying is not None:
            logits = self.copying.add_to(logits, target, parents, texts, lengths)
        return logits

    @property
    def scores_pairs(self) -> bool:
        return self.transitions is not None or self.copying is not None

    def early_exit_logits(self, target: Target, hidden: torch.Tensor) -> torch.Tensor:
        """Pruning head: (..., D) at layer L - N_s -> (..., V) next-token logits."""
        return target.logits(hidden + self.pruning(hidden))

    def num_extra_parameters(self) -> int:
        """Trained parameters beside the adapters (the paper's "extra parameters")."""
        adapters = sum(p.numel() for p in self.adapters.parameters()) if self.adapters else 0
        return sum(p.numel() for p in self.parameters()) - adapters
