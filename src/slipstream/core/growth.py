"""Growing a tree of a given size: of whole paths, or node by node.

Best-first growth takes the most confident node that is left, so that it never looks at more than
twice as many candidates as it returns.
"""

import heapq
from collections.abc import Callable, Sequence

from slipstream.core.tree import DraftTree

Children = tuple[list[int], list[float]]
"""Candidates of one level as children of one parent, most probable first: places among the
candidates, and probabilities."""


def grow_best_first(
    root: int, level_tokens: list[list[int]], level_children: list[list[Children]], budget: int
) -> DraftTree:
    """The `budget` most probable nodes (root included) of a tree whose levels have candidates.

    level_tokens: the candidates of each depth; level_children: for each depth the children of each
    candidate of the depth above (of the root alone at first). A node's probability is the product
    along its path. Nodes come out in order of probability, so the result is exactly the best tree.

    >>> children = independent_children([[0.6, 0.4], [0.9, 0.1]])
    >>> tree = grow_best_first(7, [[1, 2], [3, 4]], children, 4)
    >>> tree.tokens, tree.parents
    ([7, 1, 3, 2], [-1, 0, 1, 0])
    """
    tokens, parents, confidences = [root], [-1], [1.0]
    frontier: list[tuple[float, int, int, int, int, int]] = []
    tie = 0

    def offer(parent: int, depth: int, above: int, rank: int) -> None:
        nonlocal tie
        if depth == len(level_children):
            return
        probabilities = level_children[depth][above][1]
        if rank < len(probabilities):
            tie += 1
            probability = confidences[parent] * probabilities[rank]
            heapq.heappush(frontier, (-probability, tie, parent, depth, above, rank))

    offer(0, 0, 0, 0)
    while frontier and len(tokens) < budget:
        worth, _, parent, depth, above, rank = heapq.heappop(frontier)
        place = level_children[depth][above][0][rank]
        tokens.append(level_tokens[depth][place])
        parents.append(parent)
        confidences.append(-worth)
        offer(parent, depth, above, rank + 1)
        offer(len(tokens) - 1, depth + 1, place, 0)
    return DraftTree(tokens, parents, confidences)


def grow_by_confidence(
    root: int,
    children: Callable[[int, int], tuple[Sequence[int], Sequence[float]]],
    budget: int,
    max_depth: int,
    threshold: float = 0.0,
    beam: int | None = None,
) -> DraftTree:
    """The `budget` most confident nodes of a tree whose children depend on one token and its depth.

    children: (token, depth of its children) -> their tokens, distinct, and how probable each is,
    most probable first. A node's confidence is the product along its path. Of a level, only the
    `beam` most confident nodes have children, and of these only nodes whose confidence is at least
    `threshold`; all others may still be drafted (UNISPEC, Algorithm 1, lines 27 to 30). Nodes come
    out in order of confidence.

    >>> store = {7: ([1, 2], [0.6, 0.4]), 1: ([3, 4], [0.9, 0.1]), 2: ([5], [0.9]), 3: ([], [])}
    >>> tree = grow_by_confidence(7, lambda token, depth: store[token], 5, 2)
    >>> tree.tokens, tree.parents
    ([7, 1, 3, 2, 5], [-1, 0, 1, 0, 3])

    Below the threshold, 2 is drafted but its child 5 is not; 4 is the next most confident node:

    >>> tree = grow_by_confidence(7, lambda token, depth: store[token], 5, 2, threshold=0.5)
    >>> tree.tokens, tree.parents
    ([7, 1, 3, 2, 4], [-1, 0, 1, 0, 1])
    """
    tokens, parents, confidences, grown = [root], [-1], [1.0], [0] * (max_depth + 1)
    frontier: list[tuple[float, int, int, int, int]] = []
    families: list[tuple[Sequence[int], Sequence[float]]] = []

    def offer(family: int, parent: int, rank: int, depth: int) -> None:
        probabilities = families[family][1]
        if rank < len(probabilities):
            confidence = confidences[parent] * probabilities[rank]
            heapq.heappush(frontier, (-confidence, family, rank, parent, depth))

    def expand(node: int, depth: int) -> None:
        room = beam is None or grown[depth] < beam
        if depth < max_depth and room and confidences[node] >= threshold:
            grown[depth] += 1
            families.append(children(tokens[node], depth + 1))
            offer(len(families) - 1, node, 0, depth + 1)

    expand(0, 0)
    while frontier and len(tokens) < budget:
        worth, family, rank, parent, depth = heapq.heappop(frontier)
        tokens.append(families[family][0][rank])
        parents.append(parent)
        confidences.append(-worth)
        offer(family, parent, rank + 1, depth)
        expand(len(tokens) - 1, depth)
    return DraftTree(tokens, parents, confidences)


def independent_children(level_probabilities: list[list[float]]) -> list[list[Children]]:
    """Children of levels that are independent: the same for all parents. Most probable first."""
    above = [1, *map(len, level_probabilities)]
    return [
        [(list(range(len(probabilities))), probabilities)] * count
        for probabilities, count in zip(level_probabilities, above, strict=False)
    ]


class PathTree:
    """A tree of continuations of `root`, up to `budget` nodes; equal beginnings are one node.

    >>> paths = PathTree(7, 5)
    >>> paths.add([1, 2]), paths.add([1, 3]), paths.add([4, 5])
    (2, 3, None)
    >>> tree = paths.tree()
    >>> tree.tokens, tree.parents
    ([7, 1, 2, 3, 4], [-1, 0, 1, 1, 0])
    """

    def __init__(self, root: int, budget: int):
        self.tokens, self.parents, self.confidences = [root], [-1], [1.0]
        self.budget = budget
        self.nodes: dict[tuple[int, int], int] = {}

    def add(self, path: Sequence[int], confidences: Sequence[float] | None = None) -> int | None:
        """The node of the last token of `path`; None where the budget ends before it.

        confidences: of its nodes, None for the root's; nodes that are there keep theirs.
        """
        node = 0
        for depth, token in enumerate(path):
            key = (node, token)
            if key not in self.nodes:
                if len(self.tokens) >= self.budget:
                    return None
                self.nodes[key] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self.confidences.append(1.0 if confidences is None else confidences[depth])
            node = self.nodes[key]
        return node

    def tree(self) -> DraftTree:
        return DraftTree(self.tokens, self.parents, self.confidences)
