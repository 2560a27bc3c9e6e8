"""Drafts of one request on the host, as drafters of n-grams write them, token by token: `Trees` are
made of them, and nothing here waits for a device."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import mul


@dataclass
class Draft:
    """A draft tree as lists. tokens: the root first; parents: indices, -1 for the root, each before
    its children; confidences: estimated probabilities of the paths, 1 where none are given,
    and below 0 of nodes that are never accepted (`Trees`).

    >>> Draft.chain([7, 1, 2]).parents
    [-1, 0, 1]
    """

    tokens: list[int]
    parents: list[int]
    confidences: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise ValueError("a draft needs one parent for each token, and at least a root")
        if self.parents[0] != -1 or any(
            not 0 <= parent < node for node, parent in enumerate(self.parents) if node
        ):
            raise ValueError("node 0 is the root, with parent -1; parents precede their children")
        self.confidences = self.confidences or [1.0] * len(self.tokens)

    @classmethod
    def chain(cls, tokens: Sequence[int], confidences: Sequence[float] = ()) -> "Draft":
        """A root and one child of each node."""
        return cls(list(tokens), list(range(-1, len(tokens) - 1)), list(confidences))

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> "Draft":
        """The first so many nodes."""
        return Draft(self.tokens[:count], self.parents[:count], self.confidences[:count])

    def believed(self, trust: float) -> "Draft":
        """The same with confidences of `trust` times as much, of no node more than its parent's."""
        sure = [1.0]
        for own, parent in zip(self.confidences[1:], self.parents[1:], strict=True):
            sure.append(min(sure[parent], trust * own))
        return Draft(self.tokens, self.parents, sure)

    def merged(self, other: "Draft", budget: int) -> "Draft":
        """The union of two trees with one root; a path that both have gets the higher confidence.
        Its `budget` most confident nodes, sorted; in both no child may be surer than its parent.

        >>> one = Draft.chain([7, 1, 2], [1.0, 0.6, 0.3])
        >>> both = one.merged(Draft([7, 1, 3], [-1, 0, 0], [1.0, 0.8, 0.4]), 4)
        >>> both.tokens, both.parents, both.confidences
        ([7, 1, 3, 2], [-1, 0, 0, 1], [1.0, 0.8, 0.4, 0.3])
        """
        if len(other) == 1:
            return self
        tokens, parents, sure = [*self.tokens], [*self.parents], [*self.confidences]
        nodes = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True))}
        place: list[int] = []
        for token, parent, own in zip(other.tokens, other.parents, other.confidences, strict=True):
            pair = place[parent] if place else -1, token
            node = nodes.setdefault(pair, len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(pair[0])
                sure.append(own)
            sure[node] = max(sure[node], own)
            place.append(node)
        best = sorted(range(len(tokens)), key=sure.__getitem__, reverse=True)[:budget]
        now = {node: rank for rank, node in enumerate(best)} | {-1: -1}
        above = [now[parents[node]] for node in best]
        return Draft([tokens[node] for node in best], above, [sure[node] for node in best])

    def agreement(self, answer: Sequence[int]) -> int:
        """How many first tokens of `answer`, which came after the root, the best path has right.

        >>> Draft([7, 1, 2, 3], [-1, 0, 0, 2]).agreement([2, 3, 9])
        2
        """
        reached = {0: 0}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            depth = reached.get(parent, len(answer))
            if depth < len(answer) and answer[depth] == token:
                reached[node] = depth + 1
        return max(reached.values())

    def depths(self) -> list[int]:
        """Distance of each node from the root."""
        found = [0]
        for parent in self.parents[1:]:
            found.append(found[parent] + 1)
        return found


class PathTree:
    """A draft of continuations of `root`, up to `budget` nodes; equal beginnings are one node.

    >>> paths = PathTree(7, 5)
    >>> paths.add([1, 2]), paths.add([1, 3]), paths.add([4, 5])
    (2, 3, None)
    >>> paths.draft.tokens, paths.draft.parents
    ([7, 1, 2, 3, 4], [-1, 0, 1, 1, 0])
    """

    def __init__(self, root: int, budget: int):
        self.draft, self.budget = Draft.chain([root]), budget
        self.nodes: dict[tuple[int, int], int] = {}

    def add(self, path: Sequence[int], confidence: float = 1.0) -> int | None:
        """The node of the last token of `path`; None where the budget ends before it. Nodes that
        are new get this confidence."""
        node, draft = 0, self.draft
        for token in path:
            key = (node, token)
            if key not in self.nodes:
                if len(draft) >= self.budget:
                    return None
                self.nodes[key] = len(draft)
                draft.tokens.append(token)
                draft.parents.append(node)
                draft.confidences.append(confidence)
            node = self.nodes[key]
        return node


def grow_by_confidence(
    root: int,
    children: Callable[[int, int], tuple[Sequence[int], Sequence[float]]],
    budget: int,
    max_depth: int,
    threshold: float = 0.0,
    beam: int | None = None,
    along: Callable[[float, float], float] = mul,
) -> Draft:
    """The `budget` most confident nodes of a tree whose children depend on one token and its depth.

    children: (token, depth of its children) -> their tokens, distinct, and how probable each is,
    most probable first. along: (parent's confidence, child's probability) -> child's confidence,
    by default the product, at most the parent's. Of a level, only the `beam` most confident nodes
    have children, and of these only nodes whose confidence is at least `threshold`; all others may
    still be drafted (UNISPEC, Algorithm 1, lines 27 to 30). Nodes come out in order of confidence.

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
    # The next child of each parent, with its depth, and those after it.
    frontier: list[tuple[float, int, int, int, Iterator]] = []

    def offer(parent: int, depth: int, following: Iterator[tuple[int, float]]) -> None:
        token, probability = next(following, (None, None))
        if token is not None:
            confidence = along(confidences[parent], probability)
            heapq.heappush(frontier, (-confidence, parent, depth, token, following))

    def expand(node: int, depth: int) -> None:
        room = beam is None or grown[depth] < beam
        if depth < max_depth and room and confidences[node] >= threshold:
            grown[depth] += 1
            offer(node, depth + 1, zip(*children(tokens[node], depth + 1), strict=False))

    expand(0, 0)
    while frontier and len(tokens) < budget:
        worth, parent, depth, token, following = heapq.heappop(frontier)
        tokens.append(token)
        parents.append(parent)
        confidences.append(-worth)
        offer(parent, depth, following)
        expand(len(tokens) - 1, depth)
    return Draft(tokens, parents, confidences)
