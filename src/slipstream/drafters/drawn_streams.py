"""Trees whose children are drawn from the streams' distributions (Speculative Streaming, Eq. 9).

The shape of a tree is fixed before anything is drawn, because a child that was left out for its
token would change the distribution of the answer. Siblings are drawn without replacement.
"""

from collections.abc import Sequence
from functools import cache

import torch

from slipstream.core.drafts import Draft, grow_by_confidence
from slipstream.core.sampling import distributions, draw
from slipstream.core.transfer import on_device
from slipstream.core.trees import Drawn, Trees
from slipstream.core.verification import without
from slipstream.drafters.base import Attached, Request

KEPT = (0.6, 0.15, 0.07, 0.04)
"""How often the first, second, ... of some siblings is kept, roughly: what a shape is chosen by."""


def drawn_trees(
    streams: Attached,
    requests: Sequence[Request],
    logits: torch.Tensor,
    budget: int,
    roots: torch.Tensor,
    room: torch.Tensor,
    texts: torch.Tensor | None,
) -> Trees:
    """Trees of `budget` nodes, from (B, gamma, V) logits of `streams`, an `AttachedStreaming`.

    roots: (B,); room: (B,), more than the depth of each; texts: (B, T), all tokens up to the roots,
    for scores of pairs. What is drawn depends on the requests' own numbers and sampling alone.
    """
    device, pairs = logits.device, streams.pairs
    sizes = budget, logits.shape[1], min(streams.settings.top_k, len(KEPT))
    ranks, (levels, *known) = shape(*sizes), _on_device(*sizes, device)
    count, deepest = len(ranks), len(levels)
    points = on_device(torch.stack([request.chance.numbers(count) for request in requests]), device)
    tokens = roots[:, None].repeat(1, count)
    likely = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    probabilities = likely.new_zeros(len(logits), count, logits.shape[-1])
    for level, (nodes, families) in enumerate(levels):
        scores = likely[:, level, None].expand(-1, len(nodes), -1)
        if pairs is not None:  # the scores of the likeliest tokens after the nodes
            best = scores[:, :1].topk(streams.num_candidates(logits)).indices
            gains = pairs(tokens[:, None, nodes], best, texts, level)[:, 0].to(scores.dtype)
            scores = scores.scatter_add(-1, best.expand_as(gains), gains)
        left = distributions([request.sampling for request in requests], scores)
        probabilities[:, nodes] = left
        for children, above in families:
            own = left[:, above].flatten(0, 1)
            drawn = draw(own, points[:, children].flatten())
            tokens[:, children] = drawn.view(len(roots), -1)
            left[:, above] = without(own, drawn).view(len(roots), -1, logits.shape[-1])
    parents, confidences, depths = (each.expand_as(tokens) for each in known)
    beyond = depths >= room[:, None].clamp(min=1)
    return Trees(
        tokens,
        parents.masked_fill(beyond, -1),
        confidences.masked_fill(beyond, 0.0),
        deepest,
        Drawn(probabilities, replacement=False, siblings=max(ranks.tokens) + 1),
    )


@cache
def shape(budget: int, levels: int, most_children: int) -> Draft:
    """The tree of the nodes that are reached most often; its tokens are their places among their
    siblings.

    >>> shape(5, 2, 4).parents, shape(5, 2, 4).tokens
    ([-1, 0, 1, 0, 1], [0, 0, 0, 1, 1])
    """
    children = list(range(most_children)), KEPT[:most_children]
    return grow_by_confidence(0, lambda rank, depth: children, budget, levels)


@cache
@torch.inference_mode(False)
def _on_device(budget: int, levels: int, most_children: int, device: torch.device) -> tuple:
    """Of a shape, as tensors: of each level but the last its nodes and, by rank, their children
    with the places of these children's parents among the nodes; parents; confidences; depths."""
    ranks = shape(budget, levels, most_children)
    depths, found = ranks.depths(), []
    for level in range(max(depths)):
        nodes, below = ([n for n, d in enumerate(depths) if d == level + more] for more in (0, 1))
        kinds = [[n for n in below if ranks.tokens[n] == rank] for rank in range(most_children)]
        families = [(own, [nodes.index(ranks.parents[n]) for n in own]) for own in kinds if own]
        tensors = [tuple(on_device(each, device) for each in family) for family in families]
        found.append((on_device(nodes, device), tensors))
    return found, *(on_device(own, device) for own in (ranks.parents, ranks.confidences, depths))
