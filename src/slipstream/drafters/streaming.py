"""Speculative Streaming as a drafter: the target drafts its own next tree.

Schedule *fused*: every node row of the verifying forward carries streams, and those of the last
accepted node become the next tree. Schedule *deferred*: the streams of that node alone run in a
short pass over the MSA layers after verification; they draft from the same states, and may be told
the root (`root_rank`). Which schedule is faster depends on the device. Children are the streams'
most probable tokens (where there are scores of pairs, given their parent), so proposals are
deterministic. The pruning head may drop unlikely nodes in the middle of the forward.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.core.errors import InputError
from slipstream.core.growth import grow_best_first
from slipstream.core.transfer import on_device
from slipstream.core.tree import DraftTree
from slipstream.drafters.base import Context, Drafter, Outlook, Step
from slipstream.drafters.draft_length import DraftLength, Drawn, check_length
from slipstream.drafters.stream_visitors import Pruning, Streams
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.streaming.pairs import PairScores
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.lora import merge
from slipstream.targets.packed import is_packed
from slipstream.targets.target import Rows, Target

SCHEDULES = ("auto", "fused", "deferred")
CANDIDATES = 8
"""Where scores of pairs choose among a stream's tokens: so many times `top_k` are looked at."""
MOST_CANDIDATES = 256
"""But no more than these: all pairs of two levels' candidates are scored."""


class Streaming(Drafter):
    """Drafts with the streams of a `StreamingSpeculator`, given itself or as a folder.

    schedule: 'fused', 'deferred', or 'auto' for deferred where the mode allows it (lossless).
    top_k: most children per level; prune_threshold: least transition probability of a node that
    stays in the forward after the early exit; prune_cap: most nodes that stay. Threshold 0 with no
    cap switches pruning off. length: a rule that may want a tree less deep, None for none.
    """

    # Of the batch and the target at hand: no settings, which would tell calibrations apart.
    most_children = sys.maxsize
    _fused_variant: "Streaming | None" = None

    def __init__(
        self,
        speculator: StreamingSpeculator | str | Path,
        schedule: str,
        top_k: int,
        prune_threshold: float = 0.0,
        prune_cap: int | None = None,
        length: DraftLength | None = None,
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
        self.speculator = self.drafting = speculator
        self._first_streams: dict[int, StreamingSpeculator] = {}
        self.schedule = self.asked_schedule = schedule
        self.top_k = top_k
        self.prune_threshold, self.prune_cap = prune_threshold, prune_cap
        self.length = check_length(
            length or DraftLength(), ("nothing", "confidence", "logits"), "streaming"
        )
        self.target: Target | None = None
        self._bound: Target | None = None
        self.merged = self.pairs = None
        self.trees: list[DraftTree] | None = None
        self.drafted: list[DraftTree] | None = None
        self.levels: torch.Tensor | None = None
        self.ends: list[int] = []
        self.prefilled = 0
        self.streams: Streams | None = None

    @property
    def fused(self) -> bool:
        return self.schedule == "fused"

    def bind(self, target: Target) -> Target:
        if target is self._bound or target is self.target:
            return self.target
        if target.num_parallel > 1:
            raise InputError(
                "drafter: streams need whole layers; use target.device_map in place of "
                "target.tensor_parallel, or drafter=draft_model or drafter=prompt_lookup"
            )
        if not isinstance(self.speculator, StreamingSpeculator):
            self.speculator = load_speculator(self.speculator, target)
        self.speculator = self.speculator.placed(target).eval()
        self.drafting, self._first_streams = self.speculator, {}
        given, shared = target, self.speculator.config.mode == "shared"
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
        self.streams = Streams(self)
        self.visitors = [Pruning(self), self.streams]
        if not self.fused:
            self.merged = self.speculator.merged_layers(target)
        if self.speculator.scores_pairs:
            parts = self.speculator.transitions, self.speculator.copying
            self.pairs = PairScores(target, *parts)
        self._bound, self._fused_variant = given, None
        return target

    def ways(self) -> dict[str, Drafter]:
        """Both schedules, where the choice is ours."""
        if self.asked_schedule != "auto" or self.speculator.config.mode == "shared":
            return {self.schedule: self}
        if self._fused_variant is None:
            settings = self.top_k, self.prune_threshold, self.prune_cap, self.length
            self._fused_variant = Streaming(self.speculator, "fused", *settings)
            self._fused_variant.bind(self._bound)
        return {self.schedule: self, self._fused_variant.schedule: self._fused_variant}

    def begin(self, contexts: list[Context], budget: int) -> None:
        self.drafting, self.most_children = self._reaching(budget - 1), max(1, budget - 1)
        self.trees, self.drafted, self.prefilled = None, None, 0
        self.length.begin(len(contexts))
        self.ends = [len(context.tokens) - 1 for context in contexts]

    def _reaching(self, depth: int) -> StreamingSpeculator:
        """The speculator without the streams that a tree of this depth has no level for.

        In shared mode all must run, since the main stream sees them.
        """
        count = max(1, min(self.speculator.num_streams, depth))
        if self.speculator.config.mode == "shared" or count == self.speculator.num_streams:
            return self.speculator
        if count not in self._first_streams:
            fewer = self.speculator.first_streams(self.target, count)
            self._first_streams[count] = fewer.placed(self.target).eval()
        return self._first_streams[count]

    def extra_rows(self, budget: int) -> int:
        return (
            self.speculator.num_streams * budget if self.fused else self.speculator.num_streams + 1
        )

    def propose(self, contexts: list[Context], budget: int) -> list[DraftTree]:
        with contexts[0].clock.share("draft"):
            depths = self._depths(contexts) if budget > 1 else [0] * len(contexts)
            pairs = zip(contexts, depths, strict=True)
            self.trees = [self._grown(context, depth, budget) for context, depth in pairs]
            self.drafted = self.trees
        return self.trees

    def replaced(self, trees: list[DraftTree]) -> None:
        self.trees = trees

    def _depths(self, contexts: list[Context]) -> list[int]:
        """How deep each tree may be."""
        self.length.start()
        depths = [
            min(self.drafting.num_streams, context.max_depth, self.length.limit(place))
            for place, context in enumerate(contexts)
        ]
        if self.length.looks_at == "nothing":
            return depths
        level = 0
        while places := [place for place, depth in enumerate(depths) if level < depth]:
            logits = torch.stack([contexts[place].state.levels[level] for place in places])
            stops = self.length.stops(Drawn(places, logits, logits.argmax(-1).tolist()))
            for place, stop in zip(places, stops, strict=True):
                depths[place] = level + 1 if stop else depths[place]
            level += 1
        return depths

    def _grown(self, context: Context, depth: int, budget: int) -> DraftTree:
        """The best tree of what was foreseen."""
        if depth < 1:
            return DraftTree.chain(context.tokens[-1:])
        tokens, places, values = (tensor[:depth].tolist() for tensor in context.state.candidates)
        children = [list(zip(*level, strict=True)) for level in zip(places, values, strict=True)]
        return grow_best_first(context.tokens[-1], tokens, children, budget)

    def foresee(self, contexts: list[Context], outlook: Outlook) -> tuple[torch.Tensor, ...]:
        """What `candidates` finds at the last accepted nodes."""
        with contexts[0].clock.share("draft"):
            streams = (
                self._fused_streams(outlook) if self.fused else self._deferred(contexts, outlook)
            )
            logits = self.levels = self.target.logits(streams).float()
            texts = None if self.pairs is None else outlook.texts(contexts)
            return self.candidates(outlook.tokens, logits, texts)

    def candidates(
        self, roots: torch.Tensor, logits: torch.Tensor, texts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Candidate tokens of each level, and how probable each is as a child of those above.

        roots: (B,); logits: (B, gamma, V) of the streams; texts: (B, T), all tokens up to the
        roots, for scores of pairs. Returns tokens (B, gamma, C) and, for each candidate of the
        level above (of the root at first, C times the same), the places of its children among them
        and their probabilities, (B, gamma, C, children). The sampling temperature does not count:
        it sharpens what the target says of a token, not what streams know of the tokens to come.
        """
        logs = logits.log_softmax(-1)
        children = min(self.top_k, self.most_children)
        wanted = children if self.pairs is None else min(CANDIDATES * self.top_k, MOST_CANDIDATES)
        best = logs.topk(min(wanted, logs.shape[-1]))
        if self.pairs is None:
            places = torch.arange(best.values.shape[-1], device=logits.device)
            shape = *best.values.shape, best.values.shape[-1]
            return (
                best.indices,
                places.expand(shape),
                best.values.exp().unsqueeze(-2).expand(shape),
            )
        first = roots[:, None, None].expand_as(best.indices[:, :1])
        parents = torch.cat([first, best.indices[:, :-1]], dim=1)
        # (B, levels, parents, candidates), in logarithms: scores may be large.
        weights = best.values.unsqueeze(-2) + self.pairs(parents, best.indices, texts)
        # A token that is no candidate keeps its probability.
        others = (1 - best.values.exp().sum(-1)).clamp(min=0).log()[..., None]
        total = torch.logaddexp(weights.logsumexp(-1), others)
        ranked = weights.topk(min(children, weights.shape[-1]))
        return best.indices, ranked.indices, (ranked.values - total.unsqueeze(-1)).exp()

    def observe(self, context: Context, step: Step) -> None:
        levels = None if self.length.looks_at == "nothing" else self.levels[step.sequence]
        context.state = _Foreseen(step.foreseen, levels)
        if self.drafted is not None:  # not of the prefill, which drafts nothing
            own = self.drafted[step.sequence]
            self.length.observe(step.sequence, own.depth, own.agreement(step.answer))

    def forget(self) -> None:
        self.length.forget()

    def leave(self, kept: list[int]) -> None:
        self.length.leave(kept)

    def _fused_streams(self, outlook: Outlook) -> torch.Tensor:
        """(B, gamma, D): the streams that ran beside the last accepted nodes."""
        rows, last = outlook.rows, outlook.last
        streams = rows.hidden[:, rows.num_nodes :].unflatten(1, (-1, self.drafting.num_streams))
        # Of a prompt, the last row alone carries streams.
        carrier = torch.zeros_like(last) if self.trees is None else last
        return streams[torch.arange(len(last), device=last.device), carrier]

    def _deferred(self, contexts: list[Context], outlook: Outlook) -> torch.Tensor:
        """(B, gamma, D): the streams of the last accepted nodes, in a pass of their own."""
        each, last = torch.arange(len(outlook.last), device=outlook.last.device), outlook.last
        cache = contexts[0].cache
        with cache.passing():
            return self.drafting.run_streams(
                self.target,
                self.streams.states[each, last][:, None],
                outlook.tokens[:, None],
                outlook.rows.positions.expand(len(each), -1)[each, last][:, None],
                outlook.sees[:, None, None],
                cache,
                self.merged,
                outlook.seen,
            )

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
        return on_device(chosen, self.target.device)


@dataclass(frozen=True)
class _Foreseen:
    """Of one sequence: what `Streaming.candidates` found, on the host; levels: (gamma, V) logits on
    the device, where a rule for the draft length looks at them."""

    candidates: tuple[torch.Tensor, ...]
    levels: torch.Tensor | None
