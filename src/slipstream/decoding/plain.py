"""Plain decoding: one forward, one token. The reference for exactness and the baseline for speed.

It uses the same target calls and the same cache as the engine, and no drafter.
"""

from collections.abc import Sequence

import torch

from slipstream.core.cache import StepCache
from slipstream.core.masks import tree_mask
from slipstream.core.sampling import Sampling
from slipstream.core.transfer import sent
from slipstream.core.trees import Trees
from slipstream.core.verification import told
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.request import Ahead, Answering, Batch, choose
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
        cache, ahead = batch.cache, batch.ahead
        with batch.clock.share("verify"):
            begun = ahead and ahead.trees is batch.trees
            tokens, decided = ahead.found if begun else self._forward(batch)
            cache.commit_first([1] * len(tokens))
            batch.room, batch.trees, batch.ahead = batch.room - 1, Trees.roots(tokens[:, 0]), None
            arriving = sent(decided)
            alone = len(batch.requests) == 1 and self.running in (None, batch)
            if self.target.compiled is not None and alone and batch.requests[0].room > 1:
                # The device goes on while the host learns; in vain if the answer ends here.
                batch.ahead = Ahead(batch.trees, cache.slots, self._forward(batch))
            decided = arriving()[0].tolist()
        for request, own in zip(batch.requests, decided, strict=True):
            request.count(rows=1, accepted=0)
            request.decide(own)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens, and what the host is told of them."""
        target, cache = self.target, batch.cache
        level = cache.level and target.compiled is None
        settings, given = (target, cache.slots, level), (batch.trees.tokens, cache.ends)
        samplings = self._common(batch)
        if samplings is not None:
            settings, given = (*settings, samplings), (*given, *batch.deciding(1))
            return target.replayed(_run, settings, *given, cache=cache)
        logits = target.replayed(_logits, settings, *given, cache=cache)
        tokens = choose(batch.samplings, logits, *batch.deciding(1))
        return tokens, told(tokens, logits)


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

    level: whether all that is committed ends at `slots`; samplings: () where all requests are
    greedy; given: (B, 1) tokens, the (B,) ends of what is committed and, unless greedy, the (B, 1)
    numbers that decide.
    """
    ids, ends, *points = given
    logits = _logits(cache, target, slots, level, ids, ends)
    tokens = choose(samplings, logits, *points)
    return tokens, told(tokens, logits)


def _logits(
    cache: StepCache, target: Target, slots: int, level: bool, ids: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """(B, 1, V) after the (B, 1) tokens `ids`; for the others see `_run`."""
    mask = None
    if not level:
        own = torch.ones(len(ids), 1, 1, dtype=torch.bool, device=ids.device)
        mask = tree_mask(own, slots, ends)
    way = dict(repeats=True, readout=target.node_logits)
    return target.forward(ids, ends[:, None], mask, cache, **way).outcome
