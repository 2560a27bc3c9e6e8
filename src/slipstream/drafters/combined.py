"""One tree of several drafters' trees, under one budget: each node as confident as it has proven.

What the drafters say of a token, given the one before, is taken at its word only until it has been
put to the test: how often tokens of which they said the like were right is counted, also of those
that found no room in the tree, whenever the target's answer is known. All drafters' words together
are what is counted, because a token that one of them is sure of means less where another, which
knows the text better, has named others. Texts differ in which drafter knows them, so the count of
all prompts is corrected by how well the first drafter's and the others' tokens do in this one.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

import torch

from slipstream.core.errors import InputError
from slipstream.core.tree import DraftTree, most_confident, union
from slipstream.drafters.base import Context, Drafter, Outlook, Step
from slipstream.targets.target import Target

BINS = 3
"""Kinds of confidence of one drafter that are told apart."""
TRUST = 3.0
"""The drafters' word counts as much as tests in which so many tokens were right."""
PROMPT_TRUST = 1.0
"""What all prompts have shown counts as much as tests in this one that expected so many right."""
DOUBT = 0.3
"""Tokens that the first drafter has not named are believed so much, to begin with, in each prompt.
The four were measured on validation prompts, streams being the first."""

Words = tuple[float | None, ...]
"""How sure each drafter is of a token, given its parent: 0 where it has named others, None where it
has named none."""


class Combined(Drafter):
    """Merges the trees of `drafters`, by name, the one that is trusted most first, None where one
    is left out. `record` goes on from prompt to prompt."""

    mergeable = False

    def __init__(self, drafters: dict[str, Drafter | None]):
        drafters = {name: each for name, each in drafters.items() if each is not None}
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
    def keep(self) -> bool:
        return any(drafter.keep for drafter in self.drafters)

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
            context.state = _PromptState([None] * len(self.drafters), PromptRecord())
        for drafter in self._each(contexts):
            drafter.begin(contexts, budget)

    def extra_rows(self, budget: int) -> int:
        return sum(drafter.extra_rows(budget) for drafter in self.drafters)

    def propose(self, contexts: list[Context], budget: int) -> list[DraftTree]:
        proposed = [drafter.propose(contexts, budget) for drafter in self._each(contexts)]
        with contexts[0].clock.share("draft"):
            self.trees = [together(trees) for trees in zip(*proposed, strict=True)]
            chosen = [
                self._chosen(*each, context.state.record, budget)
                for each, context in zip(self.trees, contexts, strict=True)
            ]
        for drafter in self.drafters:
            drafter.replaced(chosen)
        return chosen

    def _chosen(
        self, tree: DraftTree, words: list[Words], here: "PromptRecord", budget: int
    ) -> DraftTree:
        confidences = [1.0]
        for parent, said in zip(tree.parents[1:], words[1:], strict=True):
            sure = min(1.0, self.record.proven(said) * here.correction(said))
            confidences.append(confidences[parent] * sure)
        proven = replace(tree, confidences=confidences)
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
            tree, words = self.trees[step.sequence]
            with context.clock.share("draft"):
                for node, right in outcomes(tree, step.answer):
                    context.state.record.count(words[node], right, self.record.proven(words[node]))
                    self.record.count(words[node], right)

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


@dataclass
class _PromptState:
    """Of one prompt: each drafter's state, and how well their tokens do."""

    states: list[Any]
    record: "PromptRecord"


@contextmanager
def _own_state(contexts: list[Context], place: int) -> Iterator[None]:
    owns = [context.state for context in contexts]
    for context, own in zip(contexts, owns, strict=True):
        context.state = own.states[place]
    yield
    for context, own in zip(contexts, owns, strict=True):
        own.states[place], context.state = context.state, own


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


def outcomes(tree: DraftTree, answer: list[int]) -> Iterator[tuple[int, bool]]:
    """The target went on with `answer`: the children of every node that it reached, and whether
    they were right.

    >>> list(outcomes(DraftTree([7, 1, 2, 3], [-1, 0, 1, 0]), [1, 5]))
    [(1, True), (2, False), (3, False)]
    """
    reached = {0: 0}
    for node in range(1, len(tree)):
        depth = reached.get(tree.parents[node], len(answer))
        if depth < len(answer):
            right = tree.tokens[node] == answer[depth]
            yield node, right
            if right:
                reached[node] = depth + 1


class Record:
    """How often tokens of which the drafters said the like were right, and should have been.

    >>> record = Record()
    >>> record.proven((0.6, None))
    0.6
    >>> for right in (True, False, False, False):
    ...     record.count((0.6, None), right)
    >>> round(record.proven((0.6, None)), 3)  # 3 + 1 right of 3 + 4 * 0.6
    0.444
    """

    def __init__(self):
        self.right: Counter[Words] = Counter()
        self.claimed: dict[Words, float] = defaultdict(float)

    def count(self, said: Words, right: bool) -> None:
        kind = _kind(said)
        self.right[kind] += right
        self.claimed[kind] += _most(said)

    def proven(self, said: Words) -> float:
        """The probability of a token of which the drafters say this, given its parent."""
        kind = _kind(said)
        proven = (self.right[kind] + TRUST) / (self.claimed[kind] + TRUST)
        return min(1.0, _most(said) * proven)


class PromptRecord:
    """How often tokens were right in one prompt, and were expected to be: of those that the first
    drafter has named, where it has named others, and where it has named none.

    >>> here = PromptRecord()
    >>> here.correction((0.5, 0.9)), here.correction((None, 0.9))
    (1.0, 0.3)
    >>> for _ in range(4):
    ...     here.count((None, 0.9), right=True, expected=0.5)
    >>> round(here.correction((None, 0.9)), 3)  # 4 + 0.3 right of 4 * 0.5 + 1
    1.433
    """

    def __init__(self):
        self.right: Counter[bool | None] = Counter()
        self.expected: dict[bool | None, float] = defaultdict(float)

    def count(self, said: Words, right: bool, expected: float) -> None:
        self.right[_named(said)] += right
        self.expected[_named(said)] += expected

    def correction(self, said: Words) -> float:
        """What to multiply the probability by that all prompts have shown."""
        named = _named(said)
        prior = PROMPT_TRUST if named else PROMPT_TRUST * DOUBT
        return (self.right[named] + prior) / (self.expected[named] + PROMPT_TRUST)


def _most(said: Words) -> float:
    """What is taken at its word: the first drafter's, else the surest of the others'."""
    return said[0] or max(sure or 0 for sure in said)


@lru_cache(maxsize=4096)  # the same words are looked up when a tree is chosen and judged
def _kind(said: Words) -> Words:
    return tuple(None if sure is None else ceil(sure * BINS) for sure in said)


def _named(said: Words) -> bool | None:
    """By the first drafter: whether it has, None where it has named nothing."""
    return None if said[0] is None else said[0] > 0
