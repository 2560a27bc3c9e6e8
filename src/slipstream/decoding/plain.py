"""Plain decoding: one forward, one token, by the target calls and the cache of the engine. The
reference for exactness and the baseline for speed."""

from collections.abc import Sequence

import torch

from slipstream.core.cache import StepCache
from slipstream.core.masks import tree_mask
from slipstream.core.sampling import Sampling, choose
from slipstream.core.transfer import sent
from slipstream.core.trees import Trees
from slipstream.core.verification import told
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.request import Answering, Batch
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
        with batch.clock.share("verify"):
            tokens, decided = batch.go_on(self._forward)
            batch.cache.commit_first([1] * len(tokens))
            batch.room, batch.trees = batch.room - 1, Trees.roots(tokens[:, 0])
            arriving = sent(decided)
            alone = len(batch.requests) == 1 and self.running in (None, batch)
            if self.target.compiled is not None and alone and batch.requests[0].room > 1:
                batch.begin(self._forward)
            decided = arriving()[0].tolist()
        for request, own in zip(batch.requests, decided, strict=True):
            request.count(rows=1, accepted=0)
            request.decide(own)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens, and what the host is told of them."""
        target, cache, samplings = self.target, batch.cache, self._common(batch)
        points, given = batch.deciding(1), (batch.trees.tokens, batch.cache.ends)
        settings = target, cache.slots, cache.level and target.compiled is None, samplings
        if samplings is not None:
            return target.replayed(_run, settings, *given, *points, cache=cache)
        logits = target.replayed(_run, settings, *given, cache=cache)
        tokens = choose(batch.samplings, logits, *points)
        return tokens, told(tokens, logits)


def _run(
    cache: StepCache,
    target: Target,
    slots: int,
    level: bool,
    samplings: tuple[Sampling, ...] | None,
    ids: torch.Tensor,
    ends: torch.Tensor,
    *points: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """(B, 1) tokens after the (B, 1) `ids`, and what the host is told: a function of tensors alone,
    so that it may be replayed.

    level: whether all that is committed ends at `slots`; samplings: () where all requests are
    greedy, None to return (B, 1, V) logits; ends: (B,), of what is committed; points: unless
    greedy, the (B, 1) numbers that decide.
    """
    mask = None
    if not level:
        own = torch.ones(len(ids), 1, 1, dtype=torch.bool, device=ids.device)
        mask = tree_mask(own, slots, ends)
    way = dict(repeats=True, readout=target.node_logits)
    logits = target.forward(ids, ends[:, None], mask, cache, **way).outcome
    if samplings is None:
        return logits
    tokens = choose(samplings, logits, *points)
    return tokens, told(tokens, logits)
