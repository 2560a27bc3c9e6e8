"""A small model that reads along: it keeps its own cache over the texts of a batch.

Draft models and verifiers look at text through it. It knows nothing of drafts, of sampling or of
the target that decides.
"""

import torch

from slipstream.core.masks import causal_mask, tree_mask
from slipstream.targets.target import Target


class Reader:
    """`model` reading the texts of a batch, each at its own length."""

    def __init__(self, model: Target):
        self.model = model
        self.cache = None

    def begin(self, capacity: int, count: int) -> None:
        """Start over with `count` texts of up to `capacity` tokens."""
        self.cache = self.model.new_cache(capacity, count)

    def leave(self, kept: list[int]) -> None:
        """Only these texts go on (ascending)."""
        self.cache.keep_sequences(kept)

    def unread(self, texts: list[list[int]]) -> list[list[int]]:
        """What of each text is still to be read."""
        return [text[read:] for text, read in zip(texts, self.cache.lengths, strict=True)]

    def forget_beyond(self, lengths: list[int]) -> None:
        """Forget what was read after the first so many tokens of each text."""
        self.cache.roll_back(*map(min, self.cache.lengths, lengths))

    def read(self, tokens: list[list[int]]) -> torch.Tensor:
        """Read on, at least one text; (B, D) states of the last tokens, before the final norm.

        Texts without new tokens have something meaningless there.
        """
        states = self.states(tokens)
        return states[range(len(tokens)), [max(0, len(own) - 1) for own in tokens]]

    def states(self, tokens: list[list[int]]) -> torch.Tensor:
        """Read on; (B, R, D) states of all new tokens before the final norm, R the most that any
        text has, right-padded with something meaningless."""
        cache, device, width = self.cache, self.model.device, max(map(len, tokens))
        ids = torch.tensor([own + [0] * (width - len(own)) for own in tokens], device=device)
        lengths = torch.tensor(cache.lengths, device=device)[:, None]
        positions = lengths + torch.arange(width, device=device)
        mask = None
        masked = self.model.compiled is not None or width > 1 or min(cache.lengths) < cache.slots
        if cache.length and masked:
            causal = causal_mask(width, device).repeat(len(tokens), 1, 1)
            mask = tree_mask(cache.lengths, causal, cache.slots)
        positions = positions.clamp(max=self.model.max_positions - 1)
        rows = self.model.forward(
            ids, positions, mask, cache, repeats=mask is not None and width <= 2
        )
        cache.commit_each([list(range(len(own))) for own in tokens])
        return rows.hidden
