"""Speculative Streaming as a drafter: the target drafts its own next tree.

Schedule *fused*: every node row of the verifying forward carries streams, and those of the last
accepted node become the next tree. Schedule *deferred*: the streams of that node alone run in a
short pass over the MSA layers after verification; they draft from the same states, and may be told
the root (`root_rank`). Which schedule is faster depends on the device. Children are the streams'
most probable tokens (where there are scores of pairs, given their parent), so proposals are
deterministic. The pruning head may drop unlikely nodes in the middle of the forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from slipstream.core.errors import InputError
from slipstream.core.tree import Children, DraftTree, grow_best_first, independent_children, prune
from slipstream.drafters.base import Context, Drafter, Step
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.streaming.pairs import PairScores
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.lora import merge
from slipstream.targets.packed import is_packed
from slipstream.targets.target import Rows, Target

SCHEDULES = ("auto", "fused", "deferred")
CANDIDATES = 8
"""Where scores of pairs choose among a stream's tokens: so many times `top_k` are looked at."""


class Streaming(Drafter):
    """Drafts with the streams of a `StreamingSpeculator`, given itself or as a folder.

    schedule: 'fused', 'deferred', or 'auto' for deferred where the mode allows it (lossless).
    top_k: most children per level; prune_threshold: least transition probability of a node that
    stays in the forward after the early exit; prune_cap: most nodes that stay. Threshold 0 with no
    cap switches pruning off.
    """

    def __init__(
        self,
        speculator: StreamingSpeculator | str | Path,
        schedule: str,
        top_k: int,
        prune_threshold: float = 0.0,
        prune_cap: int | None = None,
    ):
        if schedule not in SCHEDULES:
            raise InputError(f"drafter.schedule: must be one of {', '.join(SCHEDULES)}")
        if top_k < 1:
            raise InputError("drafter.top_k: must be at least 1")
        if not 0 <= prune_threshold < 1 or (prune_cap is not None and prune_cap < 1):
            raise InputError(
                "drafter.prune_threshold, drafter.prune_cap: the threshold must be in [0, 1) and "
                "the cap at least 1 (or null)"
            )
        self.speculator = speculator
        self.schedule, self.top_k = schedule, top_k
        self.prune_threshold, self.prune_cap = prune_threshold, prune_cap
        self.target: Target | None = None
        self.merged = self.pairs = None
        self.tree: DraftTree | None = None
        self.streams: _Streams | None = None

    @property
    def fused(self) -> bool:
        return self.schedule == "fused"

    def bind(self, target: Target) -> Target:
        if not isinstance(self.speculator, StreamingSpeculator):
            self.speculator = load_speculator(self.speculator, target)
        self.speculator = self.speculator.to(target.device, target.dtype).eval()
        shared = self.speculator.config.mode == "shared"
        if self.schedule == "auto":
            self.schedule = "fused" if shared else "deferred"
        if shared:
            if not self.fused:
                raise InputError(
                    "drafter.schedule: in shared mode the main stream sees the streams, so they "
                    "cannot wait; choose fused"
                )
            target = merge(self.speculator.adapted(target), is_packed(target.model))
        self.target = target
        self.streams = _Streams(self)
        self.visitors = [Pruning(self), self.streams]
        if not self.fused:
            self.merged = self.speculator.merged_layers(target)
        if self.speculator.scores_pairs:
            parts = self.speculator.transitions, self.speculator.copying
            self.pairs = PairScores(target, *parts)
        return target

    def begin(self, context: Context) -> None:
        self.tree = None

    def extra_rows(self, budget: int) -> int:
        return (
            self.speculator.num_streams * budget if self.fused else self.speculator.num_streams + 1
        )

    def propose(self, context: Context, budget: int) -> DraftTree:
        root = context.tokens[-1]
        levels = min(self.speculator.num_streams, context.max_depth)
        if levels < 1 or budget < 2:
            tree = DraftTree([root], [-1])
        else:
            with context.clock.share("draft"):
                streams = self.streams.last if self.fused else self._run_streams(context)
                logits = self.target.logits(streams[:levels]).float()
                temperature = 1.0 if context.sampling.greedy else context.sampling.temperature
                tokens, children = self._candidates(context.tokens, logits, temperature)
            tree = grow_best_first(root, tokens, children, budget)
        self.tree = tree
        return tree

    def _candidates(
        self, text: list[int], logits: torch.Tensor, temperature: float = 1.0
    ) -> tuple[list[list[int]], list[list[Children]]]:
        """Candidate tokens of each level, and how probable each is as a child of those above.

        text: all tokens up to the root; logits: (levels, V) of the streams.
        """
        probabilities = (logits / temperature).softmax(-1)
        if self.pairs is None:
            best = probabilities.topk(min(self.top_k, probabilities.shape[-1]))
            return best.indices.tolist(), independent_children(best.values.tolist())
        best = probabilities.topk(min(CANDIDATES * self.top_k, probabilities.shape[-1]))
        text = torch.tensor(text, device=probabilities.device)
        parents = torch.cat([text[-1:].expand_as(best.indices[:1]), best.indices[:-1]])
        scores = self.pairs(parents, best.indices, text) / temperature
        # (levels, parents, candidates); a token that is no candidate keeps its probability.
        weights = best.values[:, None] * scores.exp()
        others = (1 - best.values.sum(-1)).clamp(min=0)[:, None, None]
        weights = weights / (weights.sum(-1, keepdim=True) + others)
        ranked = weights.topk(min(self.top_k, weights.shape[-1]))
        places, values = ranked.indices.tolist(), ranked.values.tolist()
        children = [list(zip(*level, strict=True)) for level in zip(places, values, strict=True)]
        return best.indices.tolist(), children

    def observe(self, context: Context, step: Step) -> None:
        """Keep what the last accepted node has to say about its future."""
        last, rows = step.path[-1], step.rows
        if self.fused:
            streams = rows.hidden[0, rows.num_nodes :].unflatten(
                0, (-1, self.speculator.num_streams)
            )
            self.streams.last = streams[-1 if self.tree is None else last]
        else:
            self.streams.last = self.streams.states[:, last : last + 1]
            self.streams.last_position = rows.positions[:, last : last + 1]

    def _run_streams(self, context: Context) -> torch.Tensor:
        """Deferred: (gamma, D) stream states of the last committed token."""
        cache = context.cache
        sees_all = torch.ones(1, 1, 1, cache.length, dtype=torch.bool, device=self.target.device)
        streams = self.speculator.run_streams(
            self.target,
            self.streams.last,
            torch.tensor([context.tokens[-1:]], device=self.target.device),
            self.streams.last_position,
            sees_all,
            cache,
            self.merged,
        )
        cache.forget_staged()
        return streams[0]


class _Streams:
    """A visitor before the MSA layers: keeps the main rows there, and adds the streams if fused.

    Afterwards `last` is what the next tree is drafted from: the streams of the last accepted node
    (fused), or its main row, at `last_position` (deferred).
    """

    def __init__(self, drafter: Streaming):
        self.drafter = drafter
        self.layer = drafter.speculator.first_layer
        self.states: torch.Tensor | None = None
        self.last: torch.Tensor | None = None
        self.last_position: torch.Tensor | None = None

    @contextmanager
    def visit(self, rows: Rows) -> Iterator[Rows]:
        drafter = self.drafter
        self.states = rows.hidden
        if not drafter.fused:
            yield rows
            return
        chosen = torch.arange(rows.hidden.shape[1], device=rows.hidden.device)[None]
        if drafter.tree is None:
            chosen = chosen[:, -1:]
        rows = drafter.speculator.add_streams(rows, chosen)
        with drafter.speculator.acting_on(drafter.target, rows):
            yield rows


class Pruning:
    """A visitor at the pruning layer: drops the nodes that the early exit finds unlikely."""

    def __init__(self, drafter: Streaming):
        self.drafter = drafter
        self.layer = drafter.speculator.pruning_layer

    @contextmanager
    def visit(self, rows: Rows) -> Iterator[Rows]:
        drafter, tree = self.drafter, self.drafter.tree
        cap = drafter.prune_cap or rows.num_nodes
        if tree is not None and (drafter.prune_threshold > 0 or cap < len(tree)):
            transitions = self.transitions(rows.hidden[0, : len(tree)])
            kept = prune(tree, transitions, drafter.prune_threshold, cap)
            if len(kept) < len(tree):
                rows.keep(kept, self.layer)
                if self.layer > drafter.streams.layer:
                    drafter.streams.states = drafter.streams.states[:, kept]
        yield rows

    def transitions(self, hidden: torch.Tensor) -> list[float]:
        """N probabilities of each node given its parent, from (N, D) states at this layer."""
        tree = self.drafter.tree
        logits = self.drafter.speculator.early_exit_logits(self.drafter.target, hidden).float()
        parents = torch.tensor([0, *tree.parents[1:]], device=logits.device)
        tokens = torch.tensor(tree.tokens, device=logits.device)
        return logits.softmax(-1)[parents, tokens].tolist()
