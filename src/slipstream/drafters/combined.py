"""One tree of several drafters' trees, under one budget: each node as confident as it has proven.

What the drafters say of a token, given the one before, is taken at its word only until it has been
put to the test: how often tokens of which they said the like were right is counted, also of those
that found no room in the tree, whenever the target's answer is known. All drafters' words together
are what is counted, because a token that one of them is sure of means less where another, which
knows the text better, has named others.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil

import torch

from slipstream.core.errors import InputError
from slipstream.core.tree import DraftTree, most_confident, union
from slipstream.drafters.base import Context, Drafter, Outlook, Step
from slipstream.targets.target import Target

BINS = 5
"""Kinds of confidence of one drafter that are told apart."""
TRUST = 3.0
"""The drafters' word counts as much as tests in which so many tokens were right."""
DOUBT = 0.2
"""What the others say of a token is believed so much, to begin with, where the first drafter has
named other tokens. Measured on validation prompts, streams being the first, as `TRUST` was."""

Words = tuple[float | None, ...]
"""How sure each drafter is of a token, given its parent: 0 where it has named others, None where it
has named none."""


class Combined(Drafter):
    """Merges the trees of `drafters`, by name, the one that is trusted most first. The record goes
    on from prompt to prompt."""

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
        self.record = Record()
        self.exact = all(drafter.exact for drafter in self.drafters)
        self.trees: list[tuple[DraftTree, list[Words]]] | None = None
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
        proposed = [drafter.propose(contexts, budget) for drafter in self._each(contexts)]
        with contexts[0].clock.share("draft"):
            self.trees = [together(trees) for trees in zip(*proposed, strict=True)]
            chosen = [self._chosen(*each, budget) for each in self.trees]
        for drafter in self.drafters:
            drafter.replaced(chosen)
        return chosen

    def _chosen(self, tree: DraftTree, words: list[Words], budget: int) -> DraftTree:
        proven = replace(tree, confidences=self.record.proven(tree, words))
        return proven.keep(most_confident(proven, budget))

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
                self.record.test(*self.trees[step.sequence], step.answer)

    def forget(self) -> None:
        self.record = Record()
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


def together(trees: Sequence[DraftTree]) -> tuple[DraftTree, list[Words]]:
    """The union of the trees, and what each drafter says of each of its N nodes.

    >>> one = DraftTree([7, 1, 2], [-1, 0, 1], [1.0, 0.8, 0.4])
    >>> other = DraftTree([7, 1, 3], [-1, 0, 0], [1.0, 0.6, 0.3])
    >>> together([one, other])[1]
    [(1.0, 1.0), (0.8, 0.6), (0.5, None), (0, 0.3)]
    """
    both, places = union(trees)
    columns = []
    for tree, own in zip(trees, places, strict=True):
        named = {own[parent] for parent in tree.parents[1:]}
        said: list[float | None] = [0 if parent in named else None for parent in both.parents]
        said[0] = 1.0
        for node in range(1, len(tree)):
            above = tree.confidences[tree.parents[node]]
            sure = min(1.0, tree.confidences[node] / above) if above > 0 else 0
            said[own[node]] = max(sure, said[own[node]] or 0)
        columns.append(said)
    return both, list(zip(*columns, strict=True))


class Record:
    """How often tokens of which the drafters said the like were right, and should have been.

    >>> record, tree = Record(), DraftTree([7, 1, 2], [-1, 0, 1])
    >>> words = [(1.0,), (0.8,), (0.8,)]
    >>> record.test(tree, words, [1, 3])  # the target said 1, then not 2
    >>> [round(confidence, 3) for confidence in record.proven(tree, words)]
    [1.0, 0.696, 0.484]
    """

    def __init__(self):
        self.right: Counter[Words] = Counter()
        self.claimed: dict[Words, float] = defaultdict(float)

    def test(self, tree: DraftTree, words: list[Words], answer: list[int]) -> None:
        """The target went on with `answer`: of every node that it reached, was a child right?"""
        reached = {0: 0}
        for node in range(1, len(tree)):
            depth = reached.get(tree.parents[node], len(answer))
            if depth < len(answer):
                kind = _kind(words[node])
                right = tree.tokens[node] == answer[depth]
                self.claimed[kind] += _sure(words[node])
                self.right[kind] += right
                if right:
                    reached[node] = depth + 1

    def proven(self, tree: DraftTree, words: list[Words]) -> list[float]:
        """N confidences of the nodes, products along their paths."""
        confidences = [1.0]
        for parent, said in zip(tree.parents[1:], words[1:], strict=True):
            kind = _kind(said)
            proven = (self.right[kind] + TRUST) / (self.claimed[kind] + TRUST)
            confidences.append(confidences[parent] * min(1.0, _sure(said) * proven))
        return confidences


def _sure(said: Words) -> float:
    first, *_ = said
    most = first or max(each or 0 for each in said)
    return DOUBT * most if first == 0 else most


def _kind(said: Words) -> Words:
    return tuple(None if sure is None else ceil(sure * BINS) for sure in said)
