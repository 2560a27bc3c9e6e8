"""Plain decoding: one forward, one token. The reference for exactness and the baseline for speed.

It uses the same target calls and the same cache as the engine, and nothing of trees or drafters.
"""

import torch

from slipstream.core.cache import StepCache
from slipstream.core.clock import Clock
from slipstream.core.masks import tree_mask
from slipstream.decoding.decoder import Decoder, Line


class PlainDecoder(Decoder):
    """Greedy or sampled decoding without drafts."""

    def _first(self, line, part, token, rows, logits, place) -> None:
        self._emit(line, token)

    def _step(self, lines: list[Line], cache: StepCache, clock: Clock) -> None:
        device, lengths = self.target.device, cache.lengths
        ids = torch.tensor([line.context.tokens[-1:] for line in lines], device=device)
        positions = torch.tensor(lengths, device=device)[:, None]
        mask = None
        if min(lengths) < cache.slots:
            own = torch.ones(len(lengths), 1, 1, dtype=torch.bool, device=device)
            mask = tree_mask(lengths, own, cache.slots)
        with clock.share("verify"):
            rows = self.target.forward(ids, positions, mask, cache, repeats=True)
            logits = self.target.logits(rows.hidden[:, 0])
        tokens = self._choose(logits, [line.context for line in lines])
        cache.commit_each([[0]] * len(lines))
        for line, token in zip(lines, tokens, strict=True):
            self._emit(line, token)

    def _emit(self, line: Line, token: int) -> None:
        line.answer.emit(token, drafted=False)
        line.context.tokens.append(token)
