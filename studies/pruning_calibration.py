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
from slipstream.drafters.base import Request, Session, Verified
from slipstream.drafters.stream_sessions import Pruning
from slipstream.drafters.streaming import AttachedStreaming, Streaming
from slipstream.targets.rows import Rows
from slipstream.targets.target import Target
from studies.watching import Watched


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


def record_trees(
    target: Target,
    drafter: Streaming,
    prompts: list[list[int]],
    budget: int,
    limits: Limits | None = None,
) -> list[SeenTree]:
    """Decode token-id `prompts` greedily with the drafter's streams, unpruned, and trees of
    `budget` nodes."""
    drafter = Streaming(drafter.speculator, drafter.schedule, drafter.top_k)
    recorder = _Recorder(drafter.attach(target))
    engine = Engine(target, recorder, Sampling(), limits or Limits(96), budget)
    for prompt in prompts:
        engine.generate(prompt)
    return recorder.recorded


class _Recorder(Watched):
    """Attached streams; remembers what pruning would have seen."""

    def __init__(self, streams: AttachedStreaming):
        super().__init__(streams, self._record)
        self.recorded: list[SeenTree] = []

    def start(self, requests: Sequence[Request], budget: int) -> Session:
        session = super().start(requests, budget)
        self.looking_on = _Recording(self.target, self.attached.speculator, 0.0, None)
        session.visitors = [self.looking_on, *session.visitors]
        return session

    def _record(self, session: Session, verified: Verified, drafted: Trees) -> None:
        (tree,) = verified.trees.drafts()
        if not verified.prompt and len(tree) > 1:
            path = verified.paths[0, : int(verified.counts[0])].tolist()
            transitions = self.looking_on.seen[0, : len(tree)].tolist()
            self.recorded.append(SeenTree(tree, transitions, path))


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
            float(whole.double().mean()),
            float(whole[drafts].double().mean()) if drafts.any() else 1.0,
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
