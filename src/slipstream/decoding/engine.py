"""The tree engine: verify the drafted trees in one forward, commit the accepted paths, draft again.

It knows the protocol of drafters and no concrete drafter.
"""

from collections.abc import Sequence

import torch

from slipstream.core.masks import tree_mask
from slipstream.core.sampling import Sampling, distributions
from slipstream.core.settings import Budget, checked
from slipstream.core.trees import Trees
from slipstream.core.verification import decided, follow, keep_or_reject, paths_to, told
from slipstream.decoding.answer import Limits
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.request import Answering, Batch, choose
from slipstream.drafters.base import Attached, Drafter, Session, Verified
from slipstream.targets.compiled import compile_like
from slipstream.targets.rows import HiddenTap, Rows
from slipstream.targets.target import Target


class Engine(Decoder):
    """Speculative decoding of `target` with `drafter`, attached to it or not; budget: nodes of a
    tree, root included."""

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
        """To how many nodes trees of `width` are padded where steps are compiled: each such number
        is compiled once."""
        return self.budget

    def _session(self, requests: Sequence[Answering], longest: int) -> Session:
        return self.attached.start(requests, self.budget)

    def _step(self, batch: Batch) -> None:
        with batch.clock.share("verify"):
            rows = self._forward(batch)
            verified = self._verify(batch, rows)
            below = None
            if rows.kept is not None:
                staged = rows.kept.clamp(min=0).gather(1, verified.paths)
                below = rows.kept_from, staged
            batch.cache.commit(verified.paths, verified.counts, below)
        width, lengths = batch.trees.width, batch.cache.lengths
        self._decided(batch, verified)
        decided = [len(own) for own in verified.host()]
        batch.cache.learn([sum(pair) for pair in zip(lengths, decided, strict=True)])
        for request, count in zip(verified.requests, decided, strict=True):
            request.count(width, count - 1)

    def _forward(self, batch: Batch) -> Rows:
        """All trees in one forward."""
        cache, trees, visitors = batch.cache, batch.trees, batch.session.visitors
        if self.target.compiled is not None:
            trees = batch.trees = trees.alike(self.widths(trees.width))
        level = cache.level and self.target.compiled is None
        if level and trees.width == 1 and all(isinstance(each, HiddenTap) for each in visitors):
            positions, mask = cache.ends[:, None], None  # roots alone see all that is committed
        else:
            settings = trees.depth, cache.slots, level, self.target.max_positions
            given = trees.tokens, trees.parents, trees.confidences, cache.ends
            found = self.target.replayed(_placed, settings, *given)
            trees.depths, trees.ancestors, positions, mask = found
        return self.target.forward(
            trees.tokens,
            positions,
            mask,
            cache,
            visitors,
            trees=trees,
            repeats=True,
            readout=self.target.node_logits,
        )

    def _verify(self, batch: Batch, rows: Rows) -> Verified:
        """Accepted paths and next tokens."""
        trees, logits = rows.trees, rows.outcome
        if trees.drawn is None or batch.greedy:
            given = *trees.columns, batch.room, logits, *batch.deciding(trees.depths)
            settings = batch.samplings, trees.depth
            # Graphs know no places of requests; and pruned rows without a cap differ in number from
            # step to step.
            often = rows.repeats and len(batch.samplings) == 1
            found = self.target.replayed(_followed, settings, *given, often=often)
        else:
            depths = torch.arange(trees.depth + 1, device=trees.tokens.device)
            depths = depths.expand(len(trees), -1)
            siblings = batch.keep[: trees.drawn.siblings]
            accept = torch.stack([batch.points(numbers, depths) for numbers in siblings], -1)
            decide = batch.points(batch.decide, depths)
            probabilities = distributions(batch.samplings, logits)
            last, tokens = keep_or_reject(trees, probabilities, accept, decide)
            found = _outcome(trees, last, tokens, batch.room, logits)
        return batch.verified("verify", trees, rows, logits, *found)


# Parts of a step between the layers: functions of tensors alone, so that they may be replayed.


def _placed(
    depth: int, slots: int, level: bool, max_positions: int, *given: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Depths, ancestors, positions and mask of trees. given: their tokens, parents, confidences,
    and the ends of what is committed; level: whether these are all at `slots`."""
    *trees, ends = given
    trees = Trees(*trees, depth)
    # Nodes beyond the context's end (lookahead branches may be) are never emitted.
    positions = (trees.depths + ends[:, None]).clamp(max=max_positions - 1)
    mask = tree_mask(trees.ancestors, slots, None if level else ends)
    return trees.depths, trees.ancestors, positions, mask


def _followed(
    samplings: tuple[Sampling, ...], depth: int, *given: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """`_outcome` of trees that are followed. given: their columns, the room, the logits after the
    nodes and, unless all requests are greedy, the numbers that decide."""
    *columns, room, logits = given[:7]
    trees, choices = Trees.known(columns, depth), choose(samplings, logits, *given[7:])
    last = follow(trees, choices)
    return _outcome(trees, last, choices.gather(1, last[:, None])[:, 0], room, logits)


def _outcome(
    trees: Trees,
    last: torch.Tensor,
    tokens: torch.Tensor,
    room: torch.Tensor,
    logits: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Paths, counts, last nodes, next tokens, decided tokens and the room left of `Verified`."""
    paths, counts = paths_to(trees, last)
    at_last = logits[torch.arange(len(last), device=last.device), last]
    emitted = decided(trees, paths, counts, told(tokens, at_last))
    return paths, counts, last, tokens, emitted, room - counts
