"""REST: drafts are what a corpus has after the longest ending of the text that occurs in it.

Source: He et al. 2024, "REST: Retrieval-Based Speculative Decoding".
"""

from slipstream.core.drafts import Draft, PathTree
from slipstream.drafters.base import AttachedHost, Drafter, HostSession, Request
from slipstream.drafters.suffixes import Retrieval, Retrieved
from slipstream.targets.target import Target


class Rest(Drafter):
    """The most frequent continuations, as a tree; a node's confidence is its share of them."""

    def __init__(self, retrieval: Retrieval):
        self.retrieval = retrieval

    def attach(self, target: Target) -> "AttachedRest":
        return AttachedRest(target, self)


class RestSession(HostSession):
    """It keeps nothing of a request."""

    def drafted(self, request: Request, state: Retrieved, budget: int) -> Draft:
        paths = PathTree(request.tokens[-1], budget)
        shares: dict[tuple[int, ...], float] = {}
        for path, share in state.counted(request.tokens):
            if len(path) >= request.room:
                continue
            if len(paths.tokens) >= budget:
                break
            shares[path] = share
            paths.add(path, [shares[path[:end]] for end in range(1, len(path) + 1)])
        return paths.draft()


class AttachedRest(AttachedHost):
    session = RestSession

    def __init__(self, target: Target, settings: Rest):
        super().__init__(target, settings)
        self.retrieved = settings.retrieval.attach(target)

    def state(self, request: Request, budget: int) -> Retrieved:
        return self.retrieved

    def memory(self) -> int:
        return self.retrieved.nbytes
