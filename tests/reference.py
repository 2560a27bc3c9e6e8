"""Plain Python versions, over lists, of what core does with tensors: references for tests."""

import heapq
from collections.abc import Sequence

import torch

from slipstream.core.drafts import Draft


class DraftTree(Draft):
    """A draft with views of its shape.

    >>> tree = DraftTree([7, 1, 2, 3], [-1, 0, 0, 1])
    >>> tree.depths(), tree.children(0), tree.path(3)
    ([0, 1, 1, 2], [1, 2], [0, 1, 3])
    """

    def depths(self) -> list[int]:
        """Distance of each node from the root."""
        depths = [0] * len(self.tokens)
        for node in range(1, len(self.tokens)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    def children(self, node: int) -> list[int]:
        """The children of `node`, in the order in which they are to be tried."""
        return [child for child in range(1, len(self.tokens)) if self.parents[child] == node]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def agreement(self, answer: list[int]) -> int:
        """How many tokens of `answer` follow the root on some path.

        >>> DraftTree([7, 1, 2, 3], [-1, 0, 0, 2]).agreement([2, 3, 9])
        2
        """
        agreed = {0: 0}
        for node in range(1, len(self.tokens)):
            reached = agreed.get(self.parents[node], len(answer))
            if reached < len(answer) and answer[reached] == self.tokens[node]:
                agreed[node] = reached + 1
        return max(agreed.values())

    def ancestor_mask(self) -> torch.Tensor:
        """(N, N) boolean on the CPU: entry [i, j] is True where j is i or an ancestor of i.

        >>> DraftTree([7, 1, 2], [-1, 0, 0]).ancestor_mask().int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
        """
        rows: list[list[bool]] = []
        for node, parent in enumerate(self.parents):
            row = list(rows[parent]) if node else [False] * len(self.tokens)
            row[node] = True
            rows.append(row)
        return torch.tensor(rows)

    def keep(self, nodes: list[int]) -> "DraftTree":
        """The tree of `nodes` alone (ascending, closed under parents, the root included)."""
        index = {node: position for position, node in enumerate(nodes)}
        return DraftTree(
            [self.tokens[node] for node in nodes],
            [index[self.parents[node]] if node else -1 for node in nodes],
            [self.confidences[node] for node in nodes],
        )


def union(trees: Sequence[DraftTree]) -> tuple[DraftTree, list[list[int]]]:
    """One tree with the paths of all, and for each tree where its nodes are in it.

    Equal siblings become one node with the highest confidence. All roots must be the same token and
    all trees deterministic (ValueError otherwise).

    >>> tree, places = union([DraftTree.chain([7, 1, 2]), DraftTree.chain([7, 1, 3])])
    >>> tree.tokens, tree.parents, places
    ([7, 1, 2, 3], [-1, 0, 1, 1], [[0, 1, 2], [0, 1, 3]])
    """
    root = trees[0].tokens[0]
    tokens, parents, confidences = [root], [-1], [1.0]
    index: dict[tuple[int, int], int] = {}
    places = []
    for tree in trees:
        if tree.tokens[0] != root:
            raise ValueError("trees with different roots have no union")
        own = [0]
        for node in range(1, len(tree)):
            key = (own[tree.parents[node]], tree.tokens[node])
            if key not in index:
                index[key] = len(tokens)
                tokens.append(key[1])
                parents.append(key[0])
                confidences.append(0.0)
            own.append(index[key])
            confidences[index[key]] = max(confidences[index[key]], tree.confidences[node])
        places.append(own)
    return DraftTree(tokens, parents, confidences), places


def most_confident(tree: DraftTree, budget: int) -> list[int]:
    """At most `budget` nodes, the root first, best path confidence first, none without its parent.

    Returns them in ascending order. A child is never worth more than its parent.

    >>> most_confident(DraftTree([7, 1, 2, 3], [-1, 0, 0, 1], [1.0, 0.6, 0.3, 0.5]), 3)
    [0, 1, 3]
    """
    kept: list[int] = []
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents[1:], start=1):
        children[parent].append(node)
    frontier = [(-tree.confidences[0], 0)]
    while frontier and len(kept) < budget:
        worth, node = heapq.heappop(frontier)
        kept.append(node)
        for child in children[node]:
            heapq.heappush(frontier, (max(worth, -tree.confidences[child]), child))
    return sorted(kept)


def prune(tree: DraftTree, transitions: list[float], threshold: float, cap: int) -> list[int]:
    """Nodes that survive early-exit pruning (Speculative Streaming, section 2.3), ascending.

    transitions: N probabilities of each node given its parent (the root's is ignored). A node
    survives if its parent does and its transition reaches `threshold`; of those, the `cap` most
    probable by the product along the path stay, so that no node outlives its parent.

    >>> prune(DraftTree([7, 1, 2, 3], [-1, 0, 0, 2]), [1.0, 0.7, 0.2, 0.9], 0.3, 8)
    [0, 1]
    """
    worth = {0: 1.0}
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if parent in worth and transitions[node] >= threshold:
            worth[node] = worth[parent] * transitions[node]
    return sorted(sorted(worth, key=lambda node: (-worth[node], node))[:cap])


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


def independent_children(level_probabilities: list[list[float]]) -> list[list[Children]]:
    """Children of levels that are independent: the same for all parents. Most probable first."""
    above = [1, *map(len, level_probabilities)]
    return [
        [(list(range(len(probabilities))), probabilities)] * count
        for probabilities, count in zip(level_probabilities, above, strict=False)
    ]


def verify_greedy(tree: DraftTree, choices: list[int]) -> tuple[list[int], int]:
    """Follow the target's argmax. choices: N token ids, the argmax after each node.

    >>> verify_greedy(DraftTree([7, 1, 2], [-1, 0, 0]), [2, 5, 9])
    ([0, 2], 9)
    """
    path, parents, tokens = [0], tree.parents, tree.tokens
    for node in range(1, len(tokens)):
        if parents[node] == path[-1] and tokens[node] == choices[path[-1]]:
            path.append(node)
    return path, choices[path[-1]]
