"""A drafter at work that is looked at: what it knew and drafted, and what had been verified."""

from collections.abc import Callable, Sequence

from slipstream.core.trees import Trees
from slipstream.drafters.base import Attached, Request, Session, Verified

Watch = Callable[[Session, Verified, Trees], None]


class Watched(Attached):
    """`attached` as it is; `watch` is called after each draft."""

    def __init__(self, attached: Attached, watch: Watch):
        super().__init__(attached.target)
        self.attached, self.watch = attached, watch

    def start(self, requests: Sequence[Request], budget: int) -> Session:
        session = self.attached.start(requests, budget)
        draft = session.draft

        def watched(verified: Verified, budget: int) -> Trees:
            trees = draft(verified, budget)
            self.watch(session, verified, trees)
            return trees

        session.draft = watched
        return session
