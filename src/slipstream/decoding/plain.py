"""Plain decoding: one forward, one token. The reference for exactness and the baseline for speed.

It uses the same target calls and the same cache as the engine, and nothing of trees or drafters.
"""

import torch

from slipstream.core.cache import StepCache
from slipstream.core.clock import Clock
from slipstream.core.masks import tree_mask
from slipstream.core.transfer import on_device
from slipstream.decoding.decoder import Decoder, Line


class PlainDecoder(Decoder):
    """Greedy or sampled decoding without drafts."""

    def _first(self, lines, firsts, start, rows, ids) -> None:
        for first in firsts:
            self._emit(lines[first.place], first.token)

    def _step(self, lines: list[Line], cache: StepCache, clock: Clock) -> None:
        device, lengths = self.target.device, cache.lengths
        ids = on_device([line.context.tokens[-1:] for line in lines], device)
        positions = on_device(lengths, device)[:, None]
        mask = None
        if self.target.compiled is not None or min(lengths) < cache.slots:
            own = torch.ones(len(lengths), 1, 1, dtype=torch.bool, device=device)
            mask = tree_mask(lengths, own, cache.slots)
        with clock.share("verify"):
            rows = self.target.forward(ids, positions, mask, cache, repeats=True)
            logits = self.target.logits(rows.hidden[:, 0])
            tokens = self._choose(logits, [line.context for line in lines])
        cache.commit_each([[0]] * len(lines))
        for line, token in zip(lines, tokens, strict=True):
            line.count(rows=1)
            self._emit(line, token)

    def _emit(self, line: Line, token: int) -> None:
        line.answer.emit(token, drafted=False)
        line.context.tokens.append(token)
