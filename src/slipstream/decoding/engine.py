"""The tree engine: verify the drafted trees in one forward, commit the accepted paths, draft again.

It knows the protocol of drafters and no concrete drafter.
"""

from collections.abc import Sequence
from functools import partial

import torch

from slipstream.core.errors import InputError
from slipstream.core.masks import tree_mask
from slipstream.core.sampling import Sampling
from slipstream.core.verification import follow, keep_or_reject, paths_to
from slipstream.decoding.answer import Limits
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.request import Answering, Batch
from slipstream.drafters.base import Attached, Drafter, Session, Verified
from slipstream.targets.compiled import compile_like
from slipstream.targets.rows import LayerVisitor, Rows
from slipstream.targets.target import Target


class Engine(Decoder):
    """Speculative decoding of `target` with `drafter`, attached to it or not; budget: nodes of a
    tree, root included."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | Attached,
        sampling: Sampling,
        limits: Limits,
        budget: int,
    ):
        if budget < 1:
            raise InputError("budget: a tree needs at least 1 node")
        self.attached = drafter.attach(target) if isinstance(drafter, Drafter) else drafter
        super().__init__(self.attached.target, sampling, limits)
        compile_like(self.target, target)
        self.budget = budget

    def _session(self, requests: Sequence[Answering], longest: int) -> Session:
        return self.attached.start(requests, self.budget)

    def _visitors(self, batch: Batch) -> Sequence[LayerVisitor]:
        return batch.session.visitors

    def _extra_rows(self, session: Session) -> int:
        return self.budget + session.extra_rows

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
        cache, trees = batch.cache, batch.trees
        if self.target.compiled is not None:
            trees = batch.trees = trees.padded(self.budget)
        # Nodes beyond the context's end (lookahead branches may be) are never emitted.
        positions = (trees.depths + cache.ends[:, None]).clamp(max=self.target.max_positions - 1)
        return self.target.forward(
            trees.tokens,
            positions,
            tree_mask(trees.ancestors, cache.slots, cache.sees()),
            cache,
            batch.session.visitors,
            trees=trees,
            repeats=True,
            readout=self.target.node_logits,
        )

    def _verify(self, batch: Batch, rows: Rows) -> Verified:
        """Accepted paths and next tokens."""
        trees, logits = rows.trees, rows.outcome
        if trees.drawn is None or batch.greedy:
            choices = batch.choose(logits, trees.depths)
            last = follow(trees, choices)
            tokens = choices.gather(1, last[:, None])[:, 0]
        else:
            depths = torch.arange(trees.depth + 1, device=trees.tokens.device)
            depths = depths.expand(len(trees), -1)
            accept = batch.points(batch.keep, depths)[..., None]
            decide = batch.points(batch.decide, depths)
            last, tokens = keep_or_reject(trees, batch.probabilities(logits), accept, decide)
        paths, counts = paths_to(trees, last)
        return Verified(
            batch.requests,
            batch.cache,
            trees,
            rows,
            logits,
            paths,
            counts,
            last,
            tokens,
            batch.room - counts,
            max(request.room for request in batch.requests) - 1,
            partial(batch.clock.share, "verify"),
        )

    def _draft(self, batch: Batch, verified: Verified) -> None:
        batch.session.ask(verified)
        batch.trees = batch.session.draft(verified, self.budget)
