"""`drafters.combined` in plain Python, over lists: the reference for tests."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from tests.reference import DraftTree, most_confident, union

from slipstream.drafters.combined import BINS, DOUBT, PROMPT_TRUST, TRUST

Words = tuple[float | None, ...]
"""How sure each drafter is of a token, given its parent: 0 where it has named others, None where it
has named none."""


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


def chosen(
    tree: DraftTree, words: list[Words], record: "Record", here: "PromptRecord", budget: int
) -> DraftTree:
    """The `budget` nodes that have proven most confident."""
    confidences = [1.0]
    for parent, said in zip(tree.parents[1:], words[1:], strict=True):
        sure = min(1.0, record.proven(said) * here.correction(said))
        confidences.append(confidences[parent] * sure)
    proven = replace(tree, confidences=confidences)
    return proven.keep(most_confident(proven, budget))


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


def _kind(said: Words) -> Words:
    return tuple(None if sure is None else ceil(sure * BINS) for sure in said)


def _named(said: Words) -> bool | None:
    """By the first drafter: whether it has, None where it has named nothing."""
    return None if said[0] is None else said[0] > 0
