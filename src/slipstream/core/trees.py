"""Trees: a batch of draft trees as tensors, from draft to commit, and the operations on them.

Node 0 is the root: the last token already decided, not yet cached. No node stands before its
parent. Shorter trees of a batch are padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F

from slipstream.core.drafts import Draft
from slipstream.core.transfer import on_device


@dataclass(frozen=True)
class Drawn:
    """What sampled children were drawn from.

    probabilities: (B, N, V), of the children of each node; with `replacement` False each later
    sibling was drawn from it with the earlier ones removed and the rest renormalised; siblings: the
    most children of a node.
    """

    probabilities: torch.Tensor
    replacement: bool = True
    siblings: int = 1


@dataclass
class Trees:
    """B trees of N nodes on one device.

    tokens, parents: (B, N) int64, parents -1 for the roots and for padding; confidences: (B, N)
    estimated probabilities of the paths to the nodes, negative for nodes that are only looked at,
    and never accepted; depth: an upper bound on that of all nodes;
    drawn: what the children were drawn from, None for deterministic ones (top-k, n-grams).

    >>> trees = Trees.of([Draft([7, 1, 2, 3], [-1, 0, 0, 1])])
    >>> trees.depths.tolist(), trees.ancestors[0, 3].int().tolist()
    ([[0, 1, 1, 2]], [1, 1, 0, 1])
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    confidences: torch.Tensor
    depth: int
    drawn: Drawn | None = None

    @classmethod
    def of(cls, drafts: Sequence[Draft], device: torch.device | str = "cpu") -> "Trees":
        """`drafts` as tensors, padded to the largest one."""
        width = max(map(len, drafts))
        numbers, confidences, device = [], [], torch.device(device)
        for draft in drafts:
            missing = width - len(draft)
            parents, depths = draft.parents + [-1] * missing, draft.depths() + [0] * missing
            numbers.append([draft.tokens + [0] * missing, parents, depths])
            confidences.append(draft.confidences + [0.0] * missing)
        depth = max(max(depths) for _, _, depths in numbers)
        tokens, parents, depths = on_device(numbers, device).unbind(1)
        trees = cls(tokens, parents, on_device(confidences, device), depth)
        trees.depths = depths
        return trees

    @classmethod
    def roots(cls, tokens: torch.Tensor) -> "Trees":
        """Trees of a root alone, from (B,) tokens."""
        tokens = tokens[:, None]
        sure = torch.ones_like(tokens, dtype=torch.float32)
        return cls(tokens, torch.full_like(tokens, -1), sure, 0)

    def __len__(self) -> int:
        """The batch size."""
        return len(self.tokens)

    @property
    def width(self) -> int:
        """Nodes of each tree, padding included."""
        return self.tokens.shape[1]

    @cached_property
    def real(self) -> torch.Tensor:
        """(B, N) bool: which nodes are no padding."""
        real = self.parents >= 0
        real[:, 0] = True
        return real

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """(B, N, N) bool: entry [b, i, j] is True where j is i or an ancestor of i.

        By pointer doubling: each node adds the ancestors of the node 1, 2, 4, ... levels above (the
        root where there are fewer) to its own, which then reach twice as far.
        """
        if self.width == 1:
            return torch.ones_like(self.tokens[..., None], dtype=torch.bool)
        nodes, each = (torch.arange(n, device=self.tokens.device) for n in self.tokens.shape[::-1])
        found = (nodes[:, None] == nodes).expand(len(self), -1, -1)
        above = torch.where(self.parents < 0, nodes, self.parents)
        for doubling in range(self.depth.bit_length()):
            above = above.gather(1, above) if doubling else above
            found = found | found[each[:, None], above]
        return found

    @cached_property
    def depths(self) -> torch.Tensor:
        """(B, N): distance of each node from the root; 0 for padding."""
        return self.ancestors.sum(-1) - 1 if self.depth else torch.zeros_like(self.parents)

    def along(self, holds: torch.Tensor) -> torch.Tensor:
        """(B, N): whether `holds`, (B, N) bool, is true of a node and of all its ancestors."""
        return (holds[:, None] | ~self.ancestors).all(-1)

    @cached_property
    def parents_or_root(self) -> torch.Tensor:
        """(B, N): parents as indices, 0 where there is none."""
        return self.parents.clamp(min=0)

    def padded(self, width: int) -> "Trees":
        """The trees with padding up to `width` nodes."""
        missing, drawn = (0, width - self.width), self.drawn
        if width <= self.width:
            return self
        if drawn is not None:
            drawn = replace(drawn, probabilities=F.pad(drawn.probabilities, (0, 0, *missing)))
        tokens, parents = F.pad(self.tokens, missing), F.pad(self.parents, missing, value=-1)
        return Trees(tokens, parents, F.pad(self.confidences, missing), self.depth, drawn)

    def alike(self, width: int) -> "Trees":
        """Padded to `width` nodes, and with a depth that is one of 0, 1, 3, 7 and so on: so that
        few steps differ in shape. Drawn children are looked at level by level: their depth stays.

        >>> Trees.of([Draft.chain([7, 1, 2], [1.0, 0.5, 0.5])]).alike(4).depth
        3
        """
        trees = self.padded(width)
        depth = trees.depth if trees.drawn else (1 << trees.depth.bit_length()) - 1
        return replace(trees, depth=depth)

    def first(self, width: int) -> "Trees":
        """The trees of the first `width` nodes alone; parents must come before their children.
        Drawn children stay as they are: leaving one out would change the distribution."""
        if width >= self.width or self.drawn is not None:
            return self
        columns = (column[:, :width] for column in (self.tokens, self.parents, self.confidences))
        return Trees(*columns, min(self.depth, width - 1))

    def select(self, nodes: torch.Tensor) -> "Trees":
        """The trees of these nodes alone.

        nodes: (B, M) indices, ascending, the root first, with all parents, -1 for padding at the
        end. ValueError for drawn children: leaving one out because of its token would change the
        distribution of the output.

        >>> trees = Trees.of([Draft([7, 1, 2, 3], [-1, 0, 0, 2])])
        >>> trees.select(torch.tensor([[0, 2, 3, -1]])).parents.tolist()
        [[-1, 0, 1, -1]]
        """
        if self.drawn is not None:
            raise ValueError("drawn children cannot be left out without changing the output")
        index, padding = nodes.clamp(min=0), nodes < 0
        now = torch.full((len(self), self.width + 1), -1, device=nodes.device)
        places = torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
        now.scatter_(1, nodes.masked_fill(padding, self.width), places)
        parents = self.parents.gather(1, index)
        moved = now.gather(1, parents.clamp(min=0))
        return Trees(
            self.tokens.gather(1, index),
            moved.masked_fill(padding | (parents < 0), -1),
            self.confidences.gather(1, index).masked_fill(padding, 0.0),
            self.depth,
        )

    def only(self, batch: list[int]) -> "Trees":
        """These trees of the batch."""
        index = on_device(batch, self.tokens.device)
        columns = (column[index] for column in (self.tokens, self.parents, self.confidences))
        drawn = self.drawn and replace(self.drawn, probabilities=self.drawn.probabilities[index])
        return Trees(*columns, self.depth, drawn)

    def join(self, other: "Trees") -> "Trees":
        """One batch of these trees and `other`. If only one side was drawn, the other's requests
        are greedy or its trees roots alone, and any distribution will do: all tokens alike."""
        one, two = self.padded(other.width), other.padded(self.width)
        drawn = one.drawn or two.drawn
        if drawn is not None:
            alike = torch.full_like(drawn.probabilities[:1], 1 / drawn.probabilities.shape[-1])
            sides = [
                each.drawn.probabilities if each.drawn else alike.expand(len(each), -1, -1)
                for each in (one, two)
            ]
            drawn = replace(drawn, probabilities=torch.cat(sides))
        tokens, parents = torch.cat([one.tokens, two.tokens]), torch.cat([one.parents, two.parents])
        confidences = torch.cat([one.confidences, two.confidences])
        return Trees(tokens, parents, confidences, max(one.depth, two.depth), drawn)

    def drafts(self) -> list[Draft]:
        """Each tree on the host, without padding; waits for the device."""
        found, columns = [], (self.tokens, self.parents, self.confidences)
        for tokens, parents, confidences in zip(*(own.tolist() for own in columns), strict=True):
            real = [node for node, parent in enumerate(parents) if parent >= 0 or not node]
            place = {node: index for index, node in enumerate(real)}
            above = [place[parents[node]] if node else -1 for node in real]
            likely = [confidences[node] for node in real]
            found.append(Draft([tokens[node] for node in real], above, likely))
        return found


def merge(trees: Sequence[Trees]) -> tuple[Trees, torch.Tensor]:
    """One batch of trees with the paths of all, and where each node is in it.

    Equal siblings become one node with the highest confidence, in the place of the first; the
    others become padding. All roots must be the same. Returns M nodes, those of the first trees
    first, and (B, M) indices. ValueError for drawn children.

    >>> both, now = merge([Trees.of([Draft.chain([7, 1, 2])]), Trees.of([Draft.chain([7, 1, 3])])])
    >>> both.tokens.tolist(), both.parents.tolist(), now.tolist()
    ([[7, 1, 2, 7, 1, 3]], [[-1, 0, 1, -1, -1, 1]], [[0, 1, 2, 0, 1, 5]])
    """
    if any(each.drawn is not None for each in trees):
        raise ValueError("a union of drawn siblings would change their distribution")
    parents, start = [], 0
    for each in trees:
        parents.append(torch.where(each.parents >= 0, each.parents + start, -1))
        start += each.width
    parents = torch.cat(parents, 1)
    tokens = torch.cat([each.tokens for each in trees], 1)
    confidences = torch.cat([each.confidences for each in trees], 1)
    depth, nodes = max(each.depth for each in trees), torch.arange(start, device=tokens.device)
    below = parents >= 0
    now = nodes.expand_as(tokens).masked_fill(~below, 0)
    same = (tokens[:, :, None] == tokens[:, None]) & below[:, :, None] & below[:, None]
    for _ in range(depth):  # each time one level more is right
        above = now.gather(1, parents.clamp(min=0))
        equal = same & (above[:, :, None] == above[:, None])
        now = torch.where(equal, nodes, start).amin(-1).masked_fill(~below, 0)
    first = (now == nodes) & below
    highest = torch.full_like(confidences, -1.0).scatter_reduce(1, now, confidences, "amax")
    highest = highest.masked_fill(~first, 0.0)
    highest[:, 0] = 1.0
    above = now.gather(1, parents.clamp(min=0))
    return Trees(tokens, torch.where(first, above, -1), highest, depth), now


def most_probable(trees: Trees, budget: int) -> torch.Tensor:
    """(B, at most `budget`) nodes, ascending, -1 for padding: those with the highest confidence,
    the root first, none without its parent. A child counts no more than its parent.

    >>> draft = Draft([7, 1, 2, 3], [-1, 0, 0, 1], [1.0, 0.6, 0.3, 0.5])
    >>> most_probable(Trees.of([draft]), 3).tolist()
    [[0, 1, 3]]
    """
    worth = torch.where(trees.ancestors, trees.confidences[:, None], torch.inf).amin(-1)
    return _best(worth, trees.real, budget)


def survivors(trees: Trees, transitions: torch.Tensor, threshold: float, cap: int) -> torch.Tensor:
    """(B, cap) nodes that survive early-exit pruning (Speculative Streaming, section 2.3),
    ascending, -1 for padding.

    transitions: (B, N) probabilities of each node given its parent (the root's is ignored). A node
    survives if its parent does and its transition reaches `threshold`; of those, the `cap` most
    probable by the product along the path stay, so that no node outlives its parent.

    >>> trees = Trees.of([Draft([7, 1, 2, 3], [-1, 0, 0, 2])])
    >>> survivors(trees, torch.tensor([[1.0, 0.7, 0.2, 0.9]]), 0.3, 3).tolist()
    [[0, 1, -1]]
    """
    transitions = transitions.masked_fill(trees.parents < 0, 1.0)
    survives = trees.along(transitions >= threshold)
    worth = torch.where(trees.ancestors, transitions[:, None], 1.0).prod(-1)
    return _best(worth, trees.real & survives, cap)


def _best(worth: torch.Tensor, allowed: torch.Tensor, count: int) -> torch.Tensor:
    """Nodes in ascending order, -1 for padding: the `count` allowed ones of the highest worth; of
    equal ones the first, so that a parent comes before a child of equal worth."""
    best = worth.masked_fill(~allowed, -1.0).sort(dim=-1, descending=True, stable=True)
    nodes = best.indices[:, :count].masked_fill(best.values[:, :count] < 0, worth.shape[1])
    nodes = nodes.sort(-1).values
    return nodes.masked_fill(nodes == worth.shape[1], -1)
