"""Choosing the pruning threshold and cap of streaming trees on a few prompts.

The prompts are decoded without pruning while the early exit's transitions are recorded; what a
threshold and a cap would have dropped, and whether it was needed, is then known for every tree.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from slipstream.core.drafts import Draft
from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.core.trees import Trees, survivors
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.base import Attached, Request, Session, Verified
from slipstream.drafters.stream_sessions import Pruning
from slipstream.drafters.streaming import AttachedStreaming
from slipstream.targets.rows import Rows
from slipstream.targets.target import Target


@dataclass(frozen=True)
class SeenTree:
    """A verified tree: transitions: N probabilities by the early exit; path: accepted nodes."""

    tree: Draft
    transitions: list[float]
    path: list[int]


@dataclass(frozen=True)
class Calibration:
    """kept_paths: share of trees whose accepted path survives whole; kept_drafts: the same among
    trees with an accepted draft, since a root always survives; pruned: share of nodes that do not
    survive."""

    threshold: float
    cap: int
    kept_paths: float
    kept_drafts: float
    pruned: float


class _Recording(Pruning):
    """The pruning visitor, looking on."""

    @contextmanager
    def visit(self, rows: Rows) -> Iterator[Rows]:
        if rows.trees is not None:
            self.seen = self.transitions(rows)
        yield rows


class _Recorder(Attached):
    """Attached streams that remember what pruning would have seen."""

    def __init__(self, streams: AttachedStreaming):
        super().__init__(streams.target)
        self.streams, self.recorded = streams, []

    def start(self, requests: Sequence[Request], budget: int) -> Session:
        session = self.streams.start(requests, budget)
        recording = _Recording(self.target, self.streams.speculator, 0.0, None)
        others = [each for each in session.visitors if not isinstance(each, Pruning)]
        session.visitors = [recording, *others]
        drafted = session.draft

        def draft(verified: Verified, budget: int) -> Trees:
            if not verified.prompt and verified.trees.depth:
                path = verified.paths[0, : int(verified.counts[0])].tolist()
                (tree,) = verified.trees.drafts()
                transitions = recording.seen[0, : len(tree)].tolist()
                if len(tree) > 1:
                    self.recorded.append(SeenTree(tree, transitions, path))
            return drafted(verified, budget)

        session.draft = draft
        return session


def record_trees(
    target: Target,
    streams: AttachedStreaming,
    prompts: list[list[int]],
    budget: int,
    limits: Limits | None = None,
) -> list[SeenTree]:
    """Decode token-id `prompts` greedily with attached streams and trees of `budget` nodes."""
    recorder = _Recorder(streams)
    engine = Engine(target, recorder, Sampling(), limits or Limits(96), budget)
    for prompt in prompts:
        engine.generate(prompt)
    return recorder.recorded


class _Together:
    """Seen trees as one batch, for many thresholds and caps."""

    def __init__(self, seen: list[SeenTree]):
        self.trees = Trees.of([each.tree for each in seen])
        width = self.trees.width
        self.transitions = torch.tensor(
            [each.transitions + [0.0] * (width - len(each.tree)) for each in seen]
        )
        self.needed = torch.zeros(len(seen), width, dtype=torch.bool)
        for place, each in enumerate(seen):
            self.needed[place, each.path] = True

    def outcome(self, threshold: float, cap: int) -> Calibration:
        kept = torch.zeros_like(self.needed)
        nodes = survivors(self.trees, self.transitions, threshold, cap)
        kept.scatter_(1, nodes.clamp(min=0), True)  # padding is the root, which is kept
        whole = (kept | ~self.needed).all(-1)
        drafts = self.needed.sum(-1) > 1
        return Calibration(
            threshold,
            cap,
            float(whole.float().mean()),
            float(whole[drafts].float().mean()) if drafts.any() else 1.0,
            1 - float(kept.sum() / self.trees.real.sum()),
        )


def outcome(seen: list[SeenTree], threshold: float, cap: int) -> Calibration:
    """What `threshold` and `cap` would have done to the trees."""
    return _Together(seen).outcome(threshold, cap)


def calibrate(seen: list[SeenTree], keep: float = 0.95) -> Calibration:
    """The threshold and cap that prune most among those that keep `keep` of the accepted drafts.

    Raises `InputError` when there is no tree to learn from.
    """
    if not seen:
        raise InputError("calibration: no trees were drafted; give longer prompts or more of them")
    together = _Together(seen)
    transitions = sorted(p for each in seen for p in each.transitions[1:])
    thresholds = {0.0, *(transitions[len(transitions) * part // 40] for part in range(40))}
    found = [
        together.outcome(threshold, cap)
        for threshold in sorted(thresholds)
        for cap in range(1, together.trees.width + 1)
    ]
    return max((each for each in found if each.kept_drafts >= keep), key=lambda each: each.pruned)
