"""REST: drafts are what a corpus has after the longest ending of the text that occurs in it.

Source: He et al. 2024, "REST: Retrieval-Based Speculative Decoding".
"""

from dataclasses import dataclass

from slipstream.core.drafts import Draft, PathTree
from slipstream.drafters.base import AttachedHost, Drafter, Request
from slipstream.drafters.suffixes import Retrieval
from slipstream.targets.target import Target


@dataclass(eq=False)
class Rest(Drafter):
    """The most frequent continuations, as a tree; a node's confidence is its share of them."""

    retrieval: Retrieval

    def attach(self, target: Target) -> "AttachedRest":
        return AttachedRest(target, self)


class AttachedRest(AttachedHost):
    """It keeps nothing of a request."""

    def __init__(self, target: Target, settings: Rest):
        super().__init__(target, settings)
        self.retrieved = settings.retrieval.attach(target)

    def drafted(self, request: Request, state: None, budget: int) -> Draft:
        paths = PathTree(request.tokens[-1], budget)
        for path, share in self.retrieved.counted(request.tokens):
            if len(path) < request.room:
                paths.add(path, share)  # one new node: beginnings come before
        return paths.draft

    def memory(self) -> int:
        return self.retrieved.corpus.nbytes
