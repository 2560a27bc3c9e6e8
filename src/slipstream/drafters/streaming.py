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
        self.trees: list[DraftTree] | None = None
        self.ends: list[int] = []
        self.prefilled = 0
        self.streams: _Streams | None = None

    @property
    def fused(self) -> bool:
        return self.schedule == "fused"

    def bind(self, target: Target) -> Target:
        if target.num_parallel > 1:
            raise InputError(
                "drafter: streams need whole layers; use target.device_map in place of "
                "target.tensor_parallel, or drafter=draft_model or drafter=prompt_lookup"
            )
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

    def begin(self, contexts: list[Context]) -> None:
        self.trees, self.prefilled = None, 0
        self.ends = [len(context.tokens) - 1 for context in contexts]

    def extra_rows(self, budget: int) -> int:
        return (
            self.speculator.num_streams * budget if self.fused else self.speculator.num_streams + 1
        )

    def propose(self, contexts: list[Context], budget: int) -> list[DraftTree]:
        self.trees = [DraftTree.chain(context.tokens[-1:]) for context in contexts]
        depths = [min(self.speculator.num_streams, context.max_depth) for context in contexts]
        drafting = [place for place, depth in enumerate(depths) if depth > 0 and budget > 1]
        if drafting:
            sampling = contexts[0].sampling
            temperature = 1.0 if sampling.greedy else sampling.temperature
            with contexts[0].clock.share("draft"):
                logits = self.target.logits(self._streams_of(contexts)[drafting]).float()
                for place, own in zip(drafting, logits, strict=True):
                    text = contexts[place].tokens
                    drafted = self._candidates(text, own[: depths[place]], temperature)
                    self.trees[place] = grow_best_first(text[-1], *drafted, budget)
        return self.trees

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
        """Keep what the last accepted node has to say about its future: its streams (fused), or its
        main row before the MSA layers and its position (deferred)."""
        place, last, rows = step.sequence, step.path[-1], step.rows
        if self.fused:
            streams = rows.hidden[place, rows.num_nodes :]
            streams = streams.unflatten(0, (-1, self.speculator.num_streams))
            context.state = streams[0 if self.trees is None else last]
        else:
            context.state = self.streams.states[place, last], rows.positions[place, last]

    def _streams_of(self, contexts: list[Context]) -> torch.Tensor:
        """(B, gamma, D) stream states of the last committed tokens."""
        if self.fused:
            return torch.stack([context.state for context in contexts])
        hidden, positions = zip(*(context.state for context in contexts), strict=True)
        cache, device = contexts[0].cache, self.target.device
        ends = torch.tensor(cache.lengths, device=device)[:, None]
        sees = torch.arange(cache.slots, device=device) < ends
        streams = self.speculator.run_streams(
            self.target,
            torch.stack(hidden)[:, None],
            torch.tensor([context.tokens[-1:] for context in contexts], device=device),
            torch.stack(positions)[:, None],
            sees[:, None, None],
            cache,
            self.merged,
        )
        cache.forget_staged()
        return streams

    def carriers(self, rows: Rows) -> torch.Tensor | None:
        """(B, P) rows of the forward at hand that carry streams, -1 for none; None if none do.

        All nodes of a tree; of a prompt, whose rows come in parts, the last one alone.
        """
        count = rows.hidden.shape[1]
        if self.trees is None:
            start, self.prefilled = self.prefilled, self.prefilled + count
            chosen = [[end - start if start <= end < start + count else -1] for end in self.ends]
        elif rows.kept is not None:
            chosen = [range(count)]
        else:
            chosen = [[*range(len(tree)), *[-1] * (count - len(tree))] for tree in self.trees]
        if max(map(max, chosen)) < 0:
            return None
        return torch.tensor(chosen, device=self.target.device)


class _Streams:
    """A visitor before the MSA layers: keeps the main rows there, (B, R, D), and adds the streams
    if fused."""

    def __init__(self, drafter: Streaming):
        self.drafter = drafter
        self.layer = drafter.speculator.first_layer
        self.states: torch.Tensor | None = None

    @contextmanager
    def visit(self, rows: Rows) -> Iterator[Rows]:
        drafter = self.drafter
        self.states = rows.hidden
        chosen = drafter.carriers(rows) if drafter.fused else None
        if chosen is None:
            yield rows
            return
        rows = drafter.speculator.add_streams(rows, chosen)
        with drafter.speculator.acting_on(drafter.target, rows):
            yield rows


class Pruning:
    """A visitor at the pruning layer: drops the nodes that the early exit finds unlikely.

    A batch is not pruned (appendix L): its sequences would keep different rows.
    """

    def __init__(self, drafter: Streaming):
        self.drafter = drafter
        self.layer = drafter.speculator.pruning_layer

    @contextmanager
    def visit(self, rows: Rows) -> Iterator[Rows]:
        drafter = self.drafter
        if drafter.trees is not None and len(drafter.trees) == 1:
            (tree,) = drafter.trees
            cap = drafter.prune_cap or len(tree)
            if drafter.prune_threshold > 0 or cap < len(tree):
                transitions = self.transitions(tree, rows.hidden[0, : len(tree)])
                kept = prune(tree, transitions, drafter.prune_threshold, cap)
                if len(kept) < len(tree):
                    rows.keep(kept, self.layer)
                    if self.layer > drafter.streams.layer:
                        drafter.streams.states = drafter.streams.states[:, kept]
        yield rows

    def transitions(self, tree: DraftTree, hidden: torch.Tensor) -> list[float]:
        """N probabilities of each node given its parent, from (N, D) states at this layer."""
        logits = self.drafter.speculator.early_exit_logits(self.drafter.target, hidden).float()
        parents = torch.tensor([0, *tree.parents[1:]], device=logits.device)
        tokens = torch.tensor(tree.tokens, device=logits.device)
        return logits.softmax(-1)[parents, tokens].tolist()
