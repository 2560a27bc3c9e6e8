"""Reading texts with a model and a cache: prompts, and what draft models and verifiers follow."""

from collections.abc import Sequence

import torch

from slipstream.core.cache import StepCache
from slipstream.core.masks import causal_mask, tree_mask
from slipstream.core.transfer import on_device, right_padded
from slipstream.targets.rows import LayerVisitor, Rows
from slipstream.targets.target import Target

PREFILL_ROWS = 1024
"""Most rows of a text in one forward."""


def read_on(
    model: Target,
    tokens: list[list[int]],
    cache: StepCache,
    visitors: Sequence[LayerVisitor] = (),
    last: torch.Tensor | None = None,
    width: int = 0,
) -> Rows:
    """Run the new tokens of B texts behind what is committed of each, and commit them.

    Texts are right-padded to the longest, at least to `width`; one may have no tokens. last: as in
    `Rows`. Forwards of up to two tokens a text, or of `width`, count as coming in every step
    (`Rows.repeats`), and so do prompts padded to the width that compiled layers want.
    """
    compiled, device = model.compiled is not None, model.device
    if compiled and not cache.bound:
        width = max(width, model.compiled.prompt_width(max(map(len, tokens)), cache))
    often, ids = max(width, 2), right_padded(tokens, device, width)
    width = ids.shape[1]
    positions = cache.ends[:, None] + torch.arange(width, device=device)
    mask = None
    alone = width == 1 and cache.level and not visitors  # a row that sees all there is
    if compiled or (cache.bound and not alone):
        causal = causal_mask(width, device).expand(len(tokens), -1, -1)
        mask = tree_mask(causal, cache.slots, None if cache.level else cache.ends)
    positions = positions.clamp(max=model.max_positions - 1)
    repeats = mask is not None and width <= often
    rows = model.forward(ids, positions, mask, cache, visitors, last=last, repeats=repeats)
    cache.commit_first([len(own) for own in tokens])
    return rows


class CachedModel:
    """`model` reading `count` texts, each at its own length, of up to `longest` tokens; at most
    `ahead` tokens of one are read at a time while others may be longer."""

    def __init__(self, model: Target, longest: int, count: int, ahead: int = 0):
        self.model, self.cache = model, model.new_cache(longest + ahead, count)

    def keep(self, texts: list[int]) -> None:
        """Only these texts go on (ascending)."""
        self.cache.keep_sequences(texts)

    def join(self, other: "CachedModel") -> None:
        """The texts of `other` come after these."""
        self.cache = joined(self.model, self.cache, other.cache)

    def unread(self, texts: list[list[int]]) -> list[list[int]]:
        """What of each text is still to be read."""
        return [text[read:] for text, read in zip(texts, self.cache.lengths, strict=True)]

    def forget_beyond(self, lengths: list[int]) -> None:
        """Forget what was read after the first so many tokens of each text."""
        self.cache.settle(list(map(min, self.cache.lengths, lengths)))

    def read(self, tokens: list[list[int]]) -> torch.Tensor:
        """Read the new `tokens` of each text; returns (B, D), the state of each text's last token
        before the final norm, which is meaningless for a text without new tokens.

        At least one text needs some. Tokens that do not fit behind the longest are read in parts.
        """
        while max(map(len, tokens)) > (most := self._most):
            parts = [own[: max(0, min(most, len(own) - most))] for own in tokens]
            read_on(self.model, parts, self.cache)
            tokens = [own[len(part) :] for own, part in zip(tokens, parts, strict=True)]
        states = read_on(self.model, tokens, self.cache).hidden
        last = [max(0, len(own) - 1) for own in tokens]  # what is wider is padding
        if len(set(last)) == 1:
            return states[:, last[0]]
        each = torch.arange(len(tokens), device=states.device)
        return states[each, on_device(last, states.device)]

    @property
    def _most(self) -> int:
        """Tokens of a text that one forward may read, at least one: a full cache says so itself."""
        return max(1, min(PREFILL_ROWS, self.cache.room - self.cache.bound))


def joined(model: Target, first: StepCache, second: StepCache | None = None) -> StepCache:
    """A cache with the sequences of both, or of the first alone: the first one, where it has room
    for them, or one over the buffers that graphs were captured for, if these are nobody's now."""
    both = [first] if second is None else [first, second]
    cache, count = first, sum(len(each.lengths) for each in both)
    room = max(each.room for each in both)
    if model.compiled and model.compiled.deserted(*both):
        cache = model.new_cache(room, count, instead_of=second)
        both = [first, *(each.copied() for each in both[1:])]
    elif second is not None and not first.fits(second):
        cache = model.new_cache(room, count, instead_of=first)
    if cache is not first or second is not None:
        with torch.inference_mode():
            cache.take_in(*both)
    return cache
