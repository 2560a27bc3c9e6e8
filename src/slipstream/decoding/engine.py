"""The tree engine: verify the drafted trees in one forward, commit the accepted paths, draft again.

It knows the protocol of drafters and no concrete drafter.
"""

from collections.abc import Sequence

import torch

from slipstream.core.cache import StepCache
from slipstream.core.masks import tree_mask
from slipstream.core.sampling import Sampling, choose, distributions
from slipstream.core.settings import Budget, checked
from slipstream.core.trees import Trees
from slipstream.core.verification import decided, follow, keep_or_reject, paths_to, told, walk
from slipstream.decoding.answer import Limits
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.request import Answering, Batch
from slipstream.drafters.base import Attached, Drafter, Session, Verified
from slipstream.targets.compiled import compile_like
from slipstream.targets.rows import HiddenTap, LayerVisitor, Rows
from slipstream.targets.target import Target


class Engine(Decoder):
    """Speculative decoding with `drafter`, attached to `target` or not; budget: nodes of a tree,
    root included."""

    @checked
    def __init__(
        self,
        target: Target,
        drafter: Drafter | Attached,
        sampling: Sampling,
        limits: Limits,
        budget: Budget,
    ):
        self.attached = drafter.attach(target) if isinstance(drafter, Drafter) else drafter
        super().__init__(self.attached.target, sampling, limits, budget)
        compile_like(self.target, target)

    def widths(self, width: int) -> int:
        """To how many nodes trees of `width` are padded; each such number is compiled once."""
        return self.budget

    def _session(self, requests: Sequence[Answering], longest: int) -> Session:
        return self.attached.start(requests, self.budget)

    def _step(self, batch: Batch) -> None:
        with batch.clock.share("verify"):
            rows = batch.go_on(self._forward)
            verified = self._verify(batch, rows)
            below = None
            if rows.kept is not None:
                staged = rows.kept.clamp(min=0).gather(1, verified.paths)
                below = rows.kept_from, staged
            batch.cache.commit(verified.paths, verified.counts, below)
        width, lengths = batch.drafted, batch.cache.lengths
        before = [request.answer.drafted for request in verified.requests]
        self._decided(batch, verified)
        decided = [len(own) for own in verified.host()]
        batch.cache.learn([sum(pair) for pair in zip(lengths, decided, strict=True)])
        for request, drafted in zip(verified.requests, before, strict=True):
            request.count(width, request.answer.drafted - drafted)

    def _begin_next(self, batch: Batch, verified: Verified) -> None:
        cache = batch.cache  # which may end up to a draft further than it will
        room = cache.bound + self.budget + batch.session.extra_rows <= cache.room
        begins = self.target.compiled is not None and room and verified.most_room
        if begins and not verified.known:
            with batch.clock.share("verify"):
                batch.begin(self._forward)

    def _forward(self, batch: Batch) -> Rows:
        """All trees in one forward, and where it led."""
        cache, trees, visitors = batch.cache, batch.trees, tuple(batch.session.visitors)
        compiled, depth = self.target.compiled is not None, trees.depth
        batch.drafted = trees.width
        if compiled:
            trees = batch.trees = trees.alike(self.widths(trees.width))
            depth = (1 << depth.bit_length()) - 1
        drawn = None if batch.greedy else trees.drawn
        given = trees.tokens, trees.parents, trees.confidences, cache.ends
        samplings = self._common(batch) if drawn is None else None
        if samplings is not None:
            given += batch.room, *batch.deciding(depth + 1)
        often, level = all(each.replays for each in visitors), cache.level and not compiled
        settings = self.target, visitors, depth, cache.slots, level, samplings
        rows = self.target.replayed(verified_rows, settings, *given, often=often, cache=cache)
        rows.trees.depth, rows.trees.drawn = trees.depth, drawn
        return rows

    def _verify(self, batch: Batch, rows: Rows) -> Verified:
        """Accepted paths and next tokens."""
        trees, (logits, *found) = rows.trees, rows.outcome
        if not found and trees.drawn is None:
            # Samplings of clients, of which there may be any number: no graph for each of them.
            given = logits, batch.room, *batch.deciding(trees.depth + 1)
            found = _followed(batch.samplings, trees, *given)
        elif not found:
            count, siblings = trees.depth + 1, batch.keep[: trees.drawn.siblings]
            accept = torch.stack([batch.points(numbers, count) for numbers in siblings], -1)
            decide = batch.points(batch.decide, count)
            probabilities = distributions(batch.samplings, logits)
            last, tokens = keep_or_reject(trees, probabilities, accept, decide)
            found = _outcome(trees, last, tokens, batch.room, logits)
        return batch.verified("verify", trees, rows, logits, *found)


def verified_rows(
    cache: StepCache,
    target: Target,
    visitors: tuple[LayerVisitor, ...],
    depth: int,
    slots: int,
    level: bool,
    samplings: tuple[Sampling, ...] | None,
    *given: torch.Tensor,
) -> Rows:
    """The forward of trees: a function of tensors alone, so that it may be replayed.

    level: whether all that is committed ends at `slots`; samplings: () where all requests are
    greedy, None for trees that are not followed here; given: the trees' tokens, parents and
    confidences, the ends of what is committed and, to follow, the room and the numbers that decide
    at each depth, none for greedy. The outcome of the rows has the logits after the nodes, and what
    `_outcome` says.
    """
    tokens, parents, confidences, ends, *following = given
    trees = Trees(tokens, parents, confidences, depth)
    if level and trees.width == 1 and all(isinstance(each, HiddenTap) for each in visitors):
        positions, mask = ends[:, None], None  # roots alone see all that is committed
    else:
        # Nodes beyond the context's end (lookahead branches may be) are never emitted.
        positions = (trees.depths + ends[:, None]).clamp(max=target.max_positions - 1)
        mask = tree_mask(trees.ancestors, slots, None if level else ends)
    way = dict(trees=trees, repeats=True, readout=target.node_logits)
    rows = target.forward(tokens, positions, mask, cache, visitors, **way)
    trees, logits, followed = rows.trees, rows.outcome, ()
    if samplings is not None:
        followed = _followed(samplings, trees, logits, *following)
    # What nobody asks for after the layers is not brought out of a graph.
    rows.mask = rows.owners = rows.readout = rows.acting = None
    rows.outcome, rows.prepared = (logits, *followed), (None, None)
    return rows


def _followed(
    samplings: tuple[Sampling, ...],
    trees: Trees,
    logits: torch.Tensor,
    room: torch.Tensor,
    *points: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """`_outcome` of trees that are followed. points: unless all requests are greedy, the numbers
    that decide at each depth."""
    if not trees.depth:  # roots alone: the numbers are theirs
        tokens = choose(samplings, logits[:, :1], *points)[:, 0]
        return _outcome(trees, torch.zeros_like(tokens), tokens, room, logits)
    wide = trees.width > trees.depth + 1
    if any(each.top_p for each in samplings) and wide and not logits.is_cuda:
        # On a CPU the most probable tokens of a node take longer to find than all else.
        each, numbers = torch.arange(len(logits)), points[0]

        def after(nodes: torch.Tensor, level: int) -> torch.Tensor:
            return choose(samplings, logits[each, nodes, None], numbers[:, level, None])[:, 0]

        return _outcome(trees, *walk(trees, after), room, logits)
    choices = choose(samplings, logits, *(numbers.gather(1, trees.depths) for numbers in points))
    last = follow(trees, choices)
    return _outcome(trees, last, choices.gather(1, last[:, None])[:, 0], room, logits)


def _outcome(
    trees: Trees, last: torch.Tensor, tokens: torch.Tensor, room: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Paths, counts, last nodes, next tokens, decided tokens and the room left of `Verified`."""
    paths, counts = paths_to(trees, last)
    at_last = logits[:, 0]
    if trees.width > 1:
        at_last = logits[torch.arange(len(last), device=last.device), last]
    emitted = decided(trees, paths, counts, told(tokens, at_last))
    return paths, counts, last, tokens, emitted, room - counts
