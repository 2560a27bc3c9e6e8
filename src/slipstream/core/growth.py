"""Growing trees of a given size on the device, for a batch at once: level by level, then the best.

A node of the `budget` most probable ones is among the `budget` most probable of its level, and so
are its ancestors: no level needs more of them.
"""

import torch

from slipstream.core.trees import Trees


def grow(
    roots: torch.Tensor,
    tokens: torch.Tensor,
    children: torch.Tensor,
    probabilities: torch.Tensor,
    budget: int,
    depths: torch.Tensor,
) -> Trees:
    """The `budget` most probable nodes, roots included, of trees whose levels have candidates.

    roots: (B,); tokens: (B, L, C), candidates of each level; children: (B, L, P, K), for each of P
    candidates of the level above (of the root, the first of them alone counts), which candidates
    follow it, and probabilities: (B, L, P, K), how probable each is; depths: (B,), of each tree. A
    node is as confident as the product along its path; nodes come in that order, a parent before
    its children also where they are equal. Nodes of probability 0 are padding.

    >>> tokens = torch.tensor([[[1, 2], [3, 4]]])
    >>> children = torch.tensor([0, 1]).expand(1, 2, 2, 2)
    >>> probabilities = torch.tensor([[[[0.6, 0.4]] * 2, [[0.9, 0.1]] * 2]])
    >>> trees = grow(torch.tensor([7]), tokens, children, probabilities, 4, torch.tensor([2]))
    >>> trees.tokens.tolist(), trees.parents.tolist()
    ([[7, 1, 3, 2]], [[-1, 0, 1, 0]])
    """
    batch, levels, _, per_parent = children.shape
    if budget < 2 or not levels:
        return Trees.roots(roots)
    most, start = budget - 1, 1
    numbers = torch.arange(1 + levels * most, device=roots.device)
    allowed = numbers[:levels] < depths[:, None]
    probabilities = probabilities * allowed[..., None, None]
    place, worth = children[:, 0, 0], probabilities[:, 0, 0]
    parents, found, count = torch.zeros_like(place), [], 1
    for level in range(levels):
        if level:
            of_parents = place[..., None].expand(-1, -1, per_parent)
            worth = (worth[..., None] * probabilities[:, level].gather(1, of_parents)).flatten(1)
            place = children[:, level].gather(1, of_parents).flatten(1)
            nodes = numbers[start - count : start, None]
            parents = nodes.expand(-1, per_parent).reshape(1, -1).expand_as(place)
        if worth.shape[1] > most:
            worth, best = worth.topk(most)
            place, parents = place.gather(1, best), parents.gather(1, best)
        found.append((tokens[:, level].gather(1, place), parents, worth))
        count = worth.shape[1]
        start += count
    ids, parents, worth = (torch.cat(column, 1) for column in zip(*found, strict=True))
    worth, order = worth.sort(dim=-1, descending=True, stable=True)
    worth, order = worth[:, :most], order[:, :most]
    now = roots.new_zeros(batch, start)
    now.scatter_(1, order + 1, numbers[1 : order.shape[1] + 1].expand_as(order))
    parents = now.gather(1, parents.gather(1, order)).masked_fill(worth <= 0, -1)
    first = roots[:, None]
    return Trees(
        torch.cat([first, ids.gather(1, order)], 1),
        torch.cat([torch.full_like(first, -1), parents], 1),
        torch.cat([torch.ones_like(worth[:, :1]), worth], 1),
        levels,
    )
