"""Plain decoding: one forward, one token. The reference for exactness and the baseline for speed.

It uses the same target calls and the same cache as the engine, and no drafter.
"""

from collections.abc import Sequence

import torch

from slipstream.core.cache import StepCache
from slipstream.core.masks import tree_mask
from slipstream.core.sampling import Sampling
from slipstream.core.transfer import on_host
from slipstream.core.trees import Trees
from slipstream.core.verification import told
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.request import Answering, Batch, choose
from slipstream.drafters.base import Session, Verified
from slipstream.targets.target import Target


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
            ids, level = batch.trees.tokens, cache.level and target.compiled is None
            settings = target, cache.slots, level, batch.samplings
            given = ids, cache.ends, *batch.deciding(1)
            often = len(batch.samplings) == 1  # graphs know no places of requests
            tokens, decided = target.replayed(_run, settings, *given, often=often, cache=cache)
            cache.commit_first([1] * len(ids))
            batch.room, batch.trees = batch.room - 1, Trees.roots(tokens[:, 0])
            decided = on_host(decided)[0].tolist()
        for request, own in zip(batch.requests, decided, strict=True):
            request.count(rows=1, accepted=0)
            request.decide(own)


def _run(
    cache: StepCache,
    target: Target,
    slots: int,
    level: bool,
    samplings: tuple[Sampling, ...],
    *given: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, 1) tokens after those that are given, and what the host is told: a function of tensors
    alone, so that it may be replayed.

    level: whether all that is committed ends at `slots`; given: the tokens, the ends of what is
    committed and, unless all requests are greedy, the numbers that decide.
    """
    (ids, ends, *points), mask = given, None
    if not level:
        own = torch.ones(len(ids), 1, 1, dtype=torch.bool, device=ids.device)
        mask = tree_mask(own, slots, ends)
    way = dict(repeats=True, readout=target.node_logits)
    rows = target.forward(ids, ends[:, None], mask, cache, **way)
    tokens = choose(samplings, rows.outcome, *points)
    return tokens, told(tokens, rows.outcome)
