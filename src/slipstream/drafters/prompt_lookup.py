"""Prompt lookup: continue as the text continued the last time its current ending occurred.

Deterministic and without training. Source: Saxena 2023, "Prompt lookup decoding". It knows only
the tokens so far.
"""

from slipstream.core.errors import InputError
from slipstream.core.tree import DraftTree
from slipstream.drafters.base import Context, Drafter


class PromptLookup(Drafter):
    """Looks for the longest suffix of up to `max_ngram` tokens that occurred earlier."""

    def __init__(self, max_ngram: int, num_tokens: int):
        if max_ngram < 1 or num_tokens < 1:
            raise InputError("drafter.max_ngram, drafter.num_tokens: must be at least 1")
        self.max_ngram, self.num_tokens = max_ngram, num_tokens

    def propose(self, contexts: list[Context], budget: int) -> list[DraftTree]:
        return [self._continued(context, budget) for context in contexts]

    def _continued(self, context: Context, budget: int) -> DraftTree:
        length = min(self.num_tokens, budget - 1, context.max_depth)
        found = continuation(context.tokens, self.max_ngram, length)
        return DraftTree.chain([context.tokens[-1], *found])


def continuation(tokens: list[int], max_ngram: int, length: int) -> list[int]:
    """Up to `length` tokens that followed the latest earlier occurrence of the longest suffix.

    >>> continuation([1, 2, 3, 9, 1, 2], 3, 2)
    [3, 9]
    """
    for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
        suffix = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                return tokens[start + size : start + size + length]
    return []
