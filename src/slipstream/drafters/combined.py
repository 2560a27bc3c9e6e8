"""One tree of several drafters' trees, under one budget: each node as confident as it has proven.

A drafter's confidence in a token, given the one before, is taken at its word only until it has been
put to the test: how often tokens of that drafter and that confidence were right is counted, also of
those that found no room in the tree, whenever the target's answer is known.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce

import torch

from slipstream.core.errors import InputError
from slipstream.core.tree import DraftTree
from slipstream.drafters.base import Context, Drafter, Outlook, Step
from slipstream.targets.target import Target

BINS = 10
"""Kinds of confidence whose record is kept."""
TRUST = 10.0
"""A drafter's word counts as much as so many tested tokens."""


class Combined(Drafter):
    """Merges the trees of `drafters`, by name. Their records go on from prompt to prompt."""

    mergeable = False

    def __init__(self, drafters: dict[str, Drafter]):
        if not drafters:
            raise InputError("drafter.drafters: name at least one drafter")
        for name, drafter in drafters.items():
            if not drafter.mergeable:
                raise InputError(
                    f"drafter.drafters.{name}: trees of {type(drafter).__name__} cannot be parts "
                    "of larger ones; leave it out"
                )
        self.drafters = list(drafters.values())
        self.records = [Record() for _ in self.drafters]
        self.exact = all(drafter.exact for drafter in self.drafters)
        self.trees: list[list[DraftTree]] | None = None
        self.foreseen: list[slice] = []

    @property
    def store_bytes(self) -> int:
        return sum(drafter.store_bytes for drafter in self.drafters)

    def bind(self, target: Target) -> Target:
        for drafter in self.drafters:
            target = drafter.bind(target)
        self.visitors = [visitor for drafter in self.drafters for visitor in drafter.visitors]
        return target

    def begin(self, contexts: list[Context], budget: int) -> None:
        if not contexts[0].sampling.greedy and any(each.draws for each in self.drafters):
            raise InputError(
                "drafter.drafters: a draft model that samples cannot be combined with others; "
                "leave it out, or set sampling.temperature=0"
            )
        self.trees = None
        for context in contexts:
            context.state = [None] * len(self.drafters)
        for drafter in self._each(contexts):
            drafter.begin(contexts, budget)

    def extra_rows(self, budget: int) -> int:
        return sum(drafter.extra_rows(budget) for drafter in self.drafters)

    def propose(self, contexts: list[Context], budget: int) -> list[DraftTree]:
        self.trees = [drafter.propose(contexts, budget) for drafter in self._each(contexts)]
        with contexts[0].clock.share("draft"):
            together = [self._together(trees, budget) for trees in zip(*self.trees, strict=True)]
        for drafter in self.drafters:
            drafter.replaced(together)
        return together

    def _together(self, trees: Sequence[DraftTree], budget: int) -> DraftTree:
        proven = [
            replace(tree, confidences=record.proven(tree))
            for record, tree in zip(self.records, trees, strict=True)
        ]
        return reduce(lambda one, other: one.merge(other, budget), proven)

    def foresee(self, contexts: list[Context], outlook: Outlook) -> tuple[torch.Tensor, ...]:
        found: list[torch.Tensor] = []
        self.foreseen = []
        for drafter in self._each(contexts):
            own = drafter.foresee(contexts, outlook)
            self.foreseen.append(slice(len(found), len(found) + len(own)))
            found += own
        return tuple(found)

    def observe(self, context: Context, step: Step) -> None:
        for place, drafter in enumerate(self._each([context])):
            drafter.observe(context, replace(step, foreseen=step.foreseen[self.foreseen[place]]))
        if self.trees is not None:
            with context.clock.share("draft"):
                for record, trees in zip(self.records, self.trees, strict=True):
                    record.test(trees[step.sequence], step.answer)

    def forget(self) -> None:
        self.records = [Record() for _ in self.drafters]
        for drafter in self.drafters:
            drafter.forget()

    def leave(self, kept: list[int]) -> None:
        for drafter in self.drafters:
            drafter.leave(kept)

    def _each(self, contexts: list[Context]) -> Iterator[Drafter]:
        """The drafters in turn, each with its own state in the contexts."""
        for place, drafter in enumerate(self.drafters):
            with _own_state(contexts, place):
                yield drafter


@contextmanager
def _own_state(contexts: list[Context], place: int) -> Iterator[None]:
    states = [context.state for context in contexts]
    for context, all_states in zip(contexts, states, strict=True):
        context.state = all_states[place]
    yield
    for context, all_states in zip(contexts, states, strict=True):
        all_states[place], context.state = context.state, all_states


class Record:
    """How often a drafter's tokens were right, by how sure it was of them given their parents.

    >>> record, tree = Record(), DraftTree([7, 1, 2], [-1, 0, 1], [1.0, 0.8, 0.8])
    >>> record.test(tree, [1, 3])  # the target said 1, then not 2
    >>> [round(confidence, 3) for confidence in record.proven(tree)]
    [1.0, 0.818, 0.744]
    """

    def __init__(self):
        self.right, self.tested = [0.0] * (BINS + 1), [0] * (BINS + 1)

    def test(self, tree: DraftTree, answer: list[int]) -> None:
        """The target went on with `answer`: of every node that it reached, was a child right?"""
        reached = {0: 0}
        for node, (parent, sure) in enumerate(_edges(tree), start=1):
            if parent in reached and reached[parent] < len(answer):
                right = tree.tokens[node] == answer[reached[parent]]
                self.tested[round(sure * BINS)] += 1
                self.right[round(sure * BINS)] += right
                if right:
                    reached[node] = reached[parent] + 1

    def proven(self, tree: DraftTree) -> list[float]:
        """N confidences of the nodes, products along their paths."""
        confidences = [1.0]
        for parent, sure in _edges(tree):
            place = round(sure * BINS)
            share = (self.right[place] + TRUST * sure) / (self.tested[place] + TRUST)
            confidences.append(confidences[parent] * share)
        return confidences


def _edges(tree: DraftTree) -> Iterator[tuple[int, float]]:
    """Of each node but the root its parent, and its confidence given the parent."""
    for parent, confidence in zip(tree.parents[1:], tree.confidences[1:], strict=True):
        above = tree.confidences[parent]
        yield parent, min(1.0, confidence / above) if above > 0 else 0.0
