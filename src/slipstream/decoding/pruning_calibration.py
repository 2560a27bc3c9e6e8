"""Choosing the pruning threshold and cap of streaming trees on a few prompts.

The prompts are decoded without pruning while the early exit's transitions are recorded; what a
threshold and a cap would have dropped, and whether it was needed, is then known for every tree.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.core.tree import DraftTree, prune
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.base import Context, Step
from slipstream.drafters.stream_visitors import Pruning
from slipstream.drafters.streaming import Streaming
from slipstream.targets.rows import Rows
from slipstream.targets.target import Target


@dataclass(frozen=True)
class SeenTree:
    """A verified tree: transitions: N probabilities by the early exit; path: accepted nodes."""

    tree: DraftTree
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
        if self.drafter.trees is not None:
            (tree,) = self.drafter.trees
            self.seen = self.transitions(tree, rows.hidden[0, : len(tree)])
        yield rows


class _Recorder(Streaming):
    """Streaming without pruning that remembers what pruning would have seen."""

    def bind(self, target: Target) -> Target:
        target = super().bind(target)
        self.recorded: list[SeenTree] = []
        self.visitors = [_Recording(self), self.streams]
        return target

    def observe(self, context: Context, step: Step) -> None:
        if self.trees is not None and len(step.tree) > 1:
            self.recorded.append(SeenTree(step.tree, self.visitors[0].seen, step.path))
        super().observe(context, step)


def record_trees(
    target: Target,
    drafter: Streaming,
    prompts: list[list[int]],
    budget: int,
    limits: Limits | None = None,
) -> list[SeenTree]:
    """Decode token-id `prompts` greedily with `drafter`'s streams and trees of `budget` nodes."""
    recorder = _Recorder(drafter.speculator, drafter.schedule, drafter.top_k)
    engine = Engine(target, recorder, Sampling(), limits or Limits(96), budget)
    for prompt in prompts:
        engine.generate(prompt)
    return recorder.recorded


def outcome(trees: list[SeenTree], threshold: float, cap: int) -> Calibration:
    """What `threshold` and `cap` would have done to `trees`."""
    whole = drafts = nodes = kept_nodes = 0
    for seen in trees:
        kept = set(prune(seen.tree, seen.transitions, threshold, cap))
        survives = kept.issuperset(seen.path)
        whole, drafts = whole + survives, drafts + (survives and len(seen.path) > 1)
        nodes, kept_nodes = nodes + len(seen.tree), kept_nodes + len(kept)
    accepted = sum(len(seen.path) > 1 for seen in trees)
    return Calibration(
        threshold,
        cap,
        whole / len(trees),
        drafts / accepted if accepted else 1.0,
        1 - kept_nodes / nodes,
    )


def calibrate(trees: list[SeenTree], keep: float = 0.95) -> Calibration:
    """The threshold and cap that prune most among those that keep `keep` of the accepted drafts.

    Raises `InputError` when there is no tree to learn from.
    """
    if not trees:
        raise InputError("calibration: no trees were drafted; give longer prompts or more of them")
    transitions = sorted(p for seen in trees for p in seen.transitions[1:])
    thresholds = {0.0, *(transitions[len(transitions) * part // 40] for part in range(40))}
    largest = max(len(seen.tree) for seen in trees)
    found = [
        outcome(trees, threshold, cap)
        for threshold in sorted(thresholds)
        for cap in range(1, largest + 1)
    ]
    return max((each for each in found if each.kept_drafts >= keep), key=lambda each: each.pruned)
