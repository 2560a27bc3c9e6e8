"""REST: drafts are what a corpus has after the longest ending of the text that occurs in it.

Source: He et al. 2024, "REST: Retrieval-Based Speculative Decoding".
"""

from slipstream.core.growth import PathTree
from slipstream.core.tree import DraftTree
from slipstream.drafters.base import Context, Drafter
from slipstream.drafters.suffixes import Retrieval
from slipstream.targets.target import Target


class Rest(Drafter):
    """The most frequent continuations, as a tree; a node's confidence is its share of them."""

    def __init__(self, retrieval: Retrieval):
        self.retrieval = retrieval

    @property
    def store_bytes(self) -> int:
        return self.retrieval.nbytes

    def bind(self, target: Target) -> Target:
        self.retrieval.bind(target)
        return target

    def propose(self, contexts: list[Context], budget: int) -> list[DraftTree]:
        with contexts[0].clock.share("draft"):
            return [self._retrieved(context, budget) for context in contexts]

    def _retrieved(self, context: Context, budget: int) -> DraftTree:
        paths = PathTree(context.tokens[-1], budget)
        shares: dict[tuple[int, ...], float] = {}
        for path, share in self.retrieval.counted(context.tokens):
            if len(path) > context.max_depth:
                continue
            if len(paths.tokens) >= budget:
                break
            shares[path] = share
            paths.add(path, [shares[path[:end]] for end in range(1, len(path) + 1)])
        return paths.tree()
