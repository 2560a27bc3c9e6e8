"""DraftTree: proposed tokens with parents, and the operations on its shape.

A tree is small (tens of nodes) and is built and walked on the host, so it is plain Python lists;
only the mask that the forward needs becomes a tensor. Node 0 is the root: the last token already
decided, whose keys and values are not yet cached. Every parent precedes its children.

Nothing here knows where the tokens come from or how they are verified.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Proposal:
    """The distribution that the sampled children of one node were drawn from.

    probabilities: (V,), exactly what the first child was drawn from; with `replacement` False each
    later child was drawn from it with the earlier siblings removed and the rest renormalised.
    """

    probabilities: torch.Tensor
    replacement: bool = True


@dataclass
class DraftTree:
    """tokens: N token ids; parents: N indices, -1 for the root; confidences: N path probabilities.

    proposals: node -> Proposal its children were drawn from; a node that is missing here has
    deterministic children (top-k, n-grams).

    >>> tree = DraftTree([7, 1, 2, 3], [-1, 0, 0, 1])
    >>> tree.depths(), tree.children(0), tree.path(3)
    ([0, 1, 1, 2], [1, 2], [0, 1, 3])
    """

    tokens: list[int]
    parents: list[int]
    confidences: list[float] | None = None
    proposals: dict[int, Proposal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise ValueError("a draft tree needs one parent per token and at least a root")
        if self.parents[0] != -1 or any(
            not 0 <= parent < node for node, parent in enumerate(self.parents) if node
        ):
            raise ValueError("node 0 is the root, with parent -1; parents precede their children")
        if self.confidences is None:
            self.confidences = [1.0] * len(self.tokens)

    @classmethod
    def chain(cls, tokens: list[int]) -> "DraftTree":
        """A root and one child per node: `chain([5, 8, 9])` has parents [-1, 0, 1]."""
        return cls(list(tokens), list(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

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

    @property
    def depth(self) -> int:
        """Of the deepest node."""
        return max(self.depths())

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
        """The tree of `nodes` alone (ascending, closed under parents, the root included).

        Raises ValueError for sampled children left out: removing a drawn child because of its
        token would change the distribution it was drawn from.
        """
        index = {node: position for position, node in enumerate(nodes)}
        for parent in self.proposals:
            if parent in index and any(child not in index for child in self.children(parent)):
                raise ValueError("sampled children cannot be pruned without changing the output")
        return DraftTree(
            [self.tokens[node] for node in nodes],
            [index[self.parents[node]] if node else -1 for node in nodes],
            [self.confidences[node] for node in nodes],
            {index[node]: value for node, value in self.proposals.items() if node in index},
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
        if tree.proposals:
            raise ValueError("a union of sampled siblings would change their distribution")
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
