"""What pruning keeps: threshold and cap calibrated on some prompts, tried on others (section 2.3).
Chains, trees and pruned trees by the number of streams and children (Figures 10 and 13).

The prompts are decoded without pruning while the early exit's transitions are recorded; what a
threshold and a cap would have dropped, and whether it was needed, is then known for every tree.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch

from slipstream.core.drafts import Draft
from slipstream.core.errors import InputError
from slipstream.core.settings import Budget, Count, PositiveShare, Size, Text
from slipstream.core.trees import Trees, survivors
from slipstream.data.rows import grouped
from slipstream.drafters.base import Session, Verified
from slipstream.drafters.stream_sessions import Pruning
from slipstream.drafters.streaming import SCHEDULES, Streaming
from slipstream.evaluation.comparison import compare, summarise
from slipstream.evaluation.methods import Method, Plain, Speculative
from slipstream.evaluation.metrics import rate_interval
from slipstream.evaluation.report import columns, telling
from slipstream.results.record import bounded
from slipstream.speculators.checkpoint import load_speculator
from slipstream.targets.rows import Rows
from studies import Plot, Prompt, Result, Target
from studies.decoding import (
    GREEDY,
    LIMITS,
    Watched,
    decode,
    divided,
    speed_ratio,
    token_ids,
)

PRUNED = ", pruned"
Outcome = dict[str, float]
"""A threshold and a cap, and what they do to trees; see `outcome`."""


def pruning(
    target: Target,
    prompts: list[Prompt],
    drafter: Streaming,
    budget: Budget,
    calibration_prompts: Count,
    keep: Sequence[PositiveShare],
) -> Result:
    """The first `calibration_prompts` choose threshold and cap, the others test them. keep: which
    share of accepted drafts must survive; looser and stricter ones are shown beside it."""
    parts = divided(prompts, calibration_prompts)
    seen, held_out = (
        record_trees(target, drafter, token_ids(target, part), budget) for part in parts
    )
    rows, possible = [], settings_of(seen)
    for share in keep:
        found = calibrate(possible, share)
        tried = outcome(held_out, found["threshold"], found["cap"])
        rows += [
            {"asked for": share, "prompts": name, **each, **kept_interval(part, each)}
            for name, part, each in (
                ("calibrated on", seen, found), ("held out", held_out, tried)
            )
        ]  # fmt: skip
    plot = Plot(
        "pruned", ("kept_drafts",), hue="prompts", interval={"kept_drafts": ("low", "high")}
    )
    return Result(f"Pruning trees of {budget} nodes", rows, (plot,))


def trees(
    target: Target,
    prompts: list[Prompt],
    speculator: Text,
    schedule: Literal[SCHEDULES],
    gammas: Sequence[Size],
    top_ks: Sequence[Size],
    largest: Budget,
    keep: PositiveShare,
    calibration_prompts: Count,
    repeats: Count,
) -> Result:
    """Trees of `gammas` levels with `top_ks` children each: full ones of up to `largest` nodes,
    beyond that their most probable `largest` nodes. With pruning, threshold and cap are calibrated
    so that `keep` of the accepted drafts survive. The first `calibration_prompts` serve that alone;
    the others are decoded by all, interleaved."""
    streams = load_speculator(speculator, target)
    if streams.config.mode == "shared":
        raise InputError("study.speculator: in shared mode no stream can be left out")
    if max(gammas) > streams.num_streams:
        raise InputError(
            f"study.gammas: {speculator} has {streams.num_streams} streams; ask for no more"
        )
    first, rest = divided(prompts, calibration_prompts)
    methods: dict[str, Method] = {"plain": Plain()}
    points: dict[str, dict[str, object]] = {}
    for gamma, top_k in product(gammas, top_ks):
        part = streams.first_streams(gamma)
        nodes = min(largest, sum(top_k**level for level in range(gamma + 1)))
        drafter = Streaming(part, schedule, top_k)
        seen = record_trees(target, drafter, token_ids(target, first), nodes)
        found = calibrate(settings_of(seen), keep)
        pruning = Streaming(part, schedule, top_k, found["threshold"], found["cap"])
        for pruned, own in (("", drafter), (PRUNED, pruning)):
            name = f"gamma {gamma}, k {top_k}{pruned}"
            points[name] = {"trees": f"gamma {gamma}{pruned}", "k": top_k, "nodes": nodes}
            methods[name] = Speculative(own, nodes)
    runs = compare(methods, rest, target, GREEDY, LIMITS, repeats, seed=0)
    # those of all prompts come last
    records = {record["method"]: record for record in summarise(runs, rest, str(target.dtype))}
    took = {run.method: [answer.statistics for answer in run.generations] for run in runs}
    rows, shown = [], []
    for name, point in points.items():
        beside = took[name.removesuffix(PRUNED)]
        gain = bounded(*speed_ratio(took[name], beside, True)) if name.endswith(PRUNED) else None
        point |= {"vs unpruned, 95 %": gain}
        rows.append(point | records[name])
        shown.append(point | columns(records[name]))
    title = f"Chains, trees and pruned trees, {schedule} (Figures 10 and 13)"
    plot = Plot("k", ("speedup_vs_plain", "tau"), hue="trees", reference=1.0)
    return Result(title, rows, (plot,), shown={title: telling(shown)})


@dataclass(frozen=True)
class SeenTree:
    """A verified tree. transitions: N probabilities by the early exit; path: accepted nodes;
    prompt: what tells apart to which of the prompts it belongs."""

    tree: Draft
    transitions: list[float]
    path: list[int]
    prompt: Hashable = 0


class _LookingOn(Pruning):
    """The pruning visitor, which remembers what it would have seen."""

    replays = False

    @contextmanager
    def visit(self, rows: Rows) -> Iterator[Rows]:
        if rows.trees is not None:
            self.seen = self.transitions(rows)
        yield rows


def record_trees(
    target: Target, drafter: Streaming, prompts: list[list[int]], budget: int
) -> list[SeenTree]:
    """Decode token-id `prompts` greedily with the drafter's streams, unpruned, and trees of
    `budget` nodes."""
    recorded: list[SeenTree] = []
    streams = Streaming(drafter.speculator, drafter.schedule, drafter.top_k).attach(target)
    looking_on = _LookingOn(streams.target, streams.speculator, 0.0, None)

    def record(session: Session, verified: Verified) -> None:
        (request,), (tree,) = verified.requests, verified.trees.drafts()
        if not verified.prompt and len(tree) > 1:
            path = verified.paths[0, : int(verified.counts[0])].tolist()
            transitions = looking_on.seen[0, : len(tree)].tolist()
            recorded.append(SeenTree(tree, transitions, path, request))

    decode(target, Watched(streams, record, [looking_on]), budget, prompts)
    return recorded


def outcome(seen: list[SeenTree], threshold: float, cap: int) -> Outcome:
    """What `threshold` and `cap` would have done to the trees. kept_paths: share of trees whose
    accepted path survives whole; kept_drafts: the same among trees with an accepted draft, since a
    root always survives; pruned: share of nodes that do not survive."""
    return _outcomes(seen, [(threshold, cap)])[0]


def kept_interval(seen: list[SeenTree], found: Outcome) -> dict[str, float]:
    """95 % of `kept_drafts` over prompts."""
    drafts = grouped((each for each in seen if len(each.path) > 1), lambda each: each.prompt)
    low = high = found["kept_drafts"]
    if drafts:
        counts = [*map(len, drafts.values())]
        tried = [outcome(own, found["threshold"], found["cap"]) for own in drafts.values()]
        kept = [n * each["kept_drafts"] for n, each in zip(counts, tried, strict=True)]
        low, high = rate_interval(kept, counts)
    return {"low": low, "high": high}


def calibrate(possible: list[Outcome], keep: float) -> Outcome:
    """The threshold and cap that prune most among those that keep `keep` of the accepted drafts."""
    enough = [each for each in possible if each["kept_drafts"] >= keep]
    return max(enough, key=lambda each: each["pruned"])


def settings_of(seen: list[SeenTree]) -> list[Outcome]:
    """Thresholds and caps, some forty of each, and what they do.

    Raises `InputError` when there is no tree to learn from.
    """
    if not seen:
        raise InputError("calibration: no trees were drafted; give longer prompts or more of them")
    transitions = sorted(p for each in seen for p in each.transitions[1:])
    thresholds = {0.0, *(transitions[len(transitions) * part // 40] for part in range(40))}
    most = max(len(each.tree) for each in seen) - 1
    caps = sorted({1 + most * part // 40 for part in range(41)})
    return _outcomes(seen, [(each, cap) for each in sorted(thresholds) for cap in caps])


def _outcomes(seen: list[SeenTree], settings: list[tuple[float, int]]) -> list[Outcome]:
    """`outcome` for each of many thresholds and caps."""
    trees = Trees.of([each.tree for each in seen])
    transitions = torch.zeros(len(seen), trees.width)
    needed = torch.zeros(len(seen), trees.width, dtype=torch.bool)
    for index, each in enumerate(seen):
        transitions[index, : len(each.tree)] = torch.tensor(each.transitions)
        needed[index, each.path] = True
    drafts, found = needed.sum(-1) > 1, []
    for threshold, cap in settings:
        nodes = survivors(trees, transitions, threshold, cap)
        # padding is the root, which is kept
        kept = torch.zeros_like(needed).scatter(1, nodes.clamp(min=0), True)
        whole = (kept | ~needed).all(-1).double()
        kept_drafts = float(whole[drafts].mean()) if drafts.any() else 1.0
        pruned = 1 - float(kept.sum() / trees.real.sum())
        kept_paths = float(whole.mean())
        own = dict(kept_paths=kept_paths, kept_drafts=kept_drafts, pruned=pruned)
        found.append({"threshold": threshold, "cap": cap} | own)
    return found
