"""Plain decoding: one forward, one token. The reference for exactness and the baseline for speed.

It uses the same target calls and the same cache as the engine, and no drafter.
"""

from collections.abc import Sequence

import torch

from slipstream.core.masks import tree_mask
from slipstream.core.transfer import on_host
from slipstream.core.trees import Trees
from slipstream.core.verification import told
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.request import Answering, Batch, choose
from slipstream.drafters.base import Session, Verified


class Undrafted(Session):
    """Requests for which nothing is drafted."""

    def draft(self, verified: Verified, budget: int) -> Trees:
        return Trees.roots(verified.next_tokens)


class PlainDecoder(Decoder):
    """Greedy or sampled decoding without drafts."""

    def _session(self, requests: Sequence[Answering], longest: int) -> Session:
        return Undrafted()

    def _step(self, batch: Batch) -> None:
        target, cache = self.target, batch.cache
        with batch.clock.share("verify"):
            ids, mask = batch.trees.tokens, None
            if target.compiled is not None or not cache.level:
                own = torch.ones(len(ids), 1, 1, dtype=torch.bool, device=ids.device)
                mask = tree_mask(own, cache.slots, cache.sees())
            way = dict(repeats=True, readout=target.node_logits)
            rows = target.forward(ids, cache.ends[:, None], mask, cache, **way)
            points = batch.deciding(torch.zeros_like(ids))
            tokens = choose(batch.samplings, rows.outcome, *points)
            cache.commit_first([1] * len(ids))
            batch.room, batch.trees = batch.room - 1, Trees.roots(tokens[:, 0])
            decided = on_host(told(tokens, rows.outcome))[0].tolist()
        for request, own in zip(batch.requests, decided, strict=True):
            request.count(rows=1, accepted=0)
            request.decide(own)
