"""Which of a tree's nodes the target agrees with, and the token that follows them, on the device.

Every rule here is exact: greedy output is the target's own, sampled output has the target's
distribution. Deterministic children need no rejection: one token is chosen at every node, the
target's argmax or a draw from its distribution, and the tree is followed as far as it goes. A child
is then accepted exactly with its probability. Children that were drawn themselves are kept or
rejected (Leviathan et al. 2023; SpecInfer's recursive rejection over siblings), level by level:
testing whole paths and keeping the longest would be biased.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from slipstream.core.sampling import draw
from slipstream.core.trees import Trees

NOT_FINITE = -2
"""Stands for a token that cannot be chosen because the target's logits are not finite."""


def follow(trees: Trees, choices: torch.Tensor) -> torch.Tensor:
    """(B,) last accepted nodes: those reached by following the (B, N) tokens chosen after each
    node. What comes next is the choice there.

    >>> from slipstream.core.drafts import Draft
    >>> follow(Trees.of([Draft([7, 1, 2], [-1, 0, 0])]), torch.tensor([[2, 5, 9]])).tolist()
    [2]
    """
    agrees = (trees.tokens == choices.gather(1, trees.parents_or_root)) & (trees.confidences >= 0)
    agrees = agrees | (trees.depths == 0)
    return (trees.along(agrees) * (trees.depths + 1)).argmax(-1)


def walk(
    trees: Trees, choose: Callable[[torch.Tensor, int], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B,) last accepted nodes, as `follow` finds them (of equal siblings the first), and (B,) the
    tokens chosen after these.

    choose: of (B,) nodes at a depth, the (B,) tokens after them; it is asked once a level, not for
    every node.

    >>> from slipstream.core.drafts import Draft
    >>> trees = Trees.of([Draft([7, 1, 2], [-1, 0, 0])])
    >>> walk(trees, lambda nodes, depth: torch.tensor([2, 5, 9])[nodes])
    (tensor([2]), tensor([9]))
    """
    last = torch.zeros_like(trees.tokens[:, 0])
    going, tokens = last == 0, choose(last, 0)
    for depth in range(1, trees.depth + 1):
        child = (trees.parents == last[:, None]) & (trees.tokens == tokens[:, None])
        child = child & (trees.confidences >= 0)
        going = going & child.any(-1)
        last = torch.where(going, child.byte().argmax(-1), last)
        tokens = torch.where(going, choose(last, depth), tokens)
    return last, tokens


def paths_to(trees: Trees, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, depth + 1) nodes from the roots to the (B,) last ones, padded with any, and (B,) how many
    they are."""
    if not trees.depth:
        return last[:, None], torch.ones_like(last)
    rows = last[:, None, None].expand(-1, 1, trees.width)
    on_path = trees.ancestors.gather(1, rows)[:, 0]
    paths = on_path.byte().argsort(dim=-1, descending=True, stable=True)
    return paths[:, : trees.depth + 1], on_path.sum(-1)


def decided(
    trees: Trees, paths: torch.Tensor, counts: torch.Tensor, following: torch.Tensor
) -> torch.Tensor:
    """(B, P): the tokens of the (B, P) paths, of which (B,) counts are nodes, after the roots,
    and the (B,) following ones; padded with -1.

    >>> from slipstream.core.drafts import Draft
    >>> paths, counts = torch.tensor([[0, 2, 1]]), torch.tensor([2])
    >>> trees = Trees.of([Draft([7, 1, 2], [-1, 0, 0])])
    >>> decided(trees, paths, counts, torch.tensor([9])).tolist()
    [[2, 9, -1]]
    """
    if not trees.depth:
        return following[:, None]
    places = torch.arange(paths.shape[1], device=paths.device)
    tokens = trees.tokens.gather(1, paths).masked_fill_(places >= counts[:, None], -1)
    # Replayed for fewer sequences, rows that belong to none may hold anything.
    end = counts[:, None].clamp(max=paths.shape[1])
    return F.pad(tokens, (0, 1), value=-1).scatter_(1, end, following[:, None])[:, 1:]


def told(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """(...) tokens as the host is told of them: `NOT_FINITE` where the (..., V) logits that they
    were chosen from hold NaN, or nothing that is finite.

    >>> told(torch.tensor([3, 0]), torch.tensor([[0.0, -torch.inf], [1.0, torch.nan]])).tolist()
    [3, -2]
    """
    highest = logits.amax(-1)
    return tokens.masked_fill(highest - highest != 0, NOT_FINITE)  # NaN, if it is not finite


def compared(trees: Trees, answers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, N) tokens that the answers have in the place of each node, and (B, N) whether the path to
    it is the answer's.

    answers: (B, T), what came after the roots, -1 for padding.
    """
    answers = F.pad(answers, (0, max(0, trees.depth - answers.shape[1])), value=-1)
    wanted = answers.gather(1, (trees.depths - 1).clamp(min=0))
    agrees = (trees.tokens == wanted) & (trees.parents >= 0)
    return wanted, trees.along(agrees | (trees.depths == 0))


def agreement(trees: Trees, answers: torch.Tensor) -> torch.Tensor:
    """(B,): how many tokens of the answers, as in `compared`, follow the roots on some path.

    >>> from slipstream.core.drafts import Draft
    >>> trees = Trees.of([Draft([7, 1, 2, 3], [-1, 0, 0, 2])])
    >>> agreement(trees, torch.tensor([[2, 3, 9]])).tolist()
    [2]
    """
    _, right = compared(trees, answers)
    return (right * trees.depths).amax(-1)


def keep_or_reject(
    trees: Trees, probabilities: torch.Tensor, accept: torch.Tensor, decide: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B,) last accepted nodes of trees whose children were drawn, and (B,) tokens that follow.

    probabilities: (B, N, V), the target's after each node; accept: (B, depth, siblings) and decide:
    (B, depth + 1) uniform numbers of the places in the answer. Children are tried in order, kept
    with min(1, p / q); after the last one the token is drawn from what rejections have left.
    """
    each = torch.arange(len(trees), device=trees.tokens.device)
    drawn_from, replacement = trees.drawn.probabilities, trees.drawn.replacement
    node = torch.zeros_like(each)
    depths, going, remaining = node, node == 0, probabilities[:, 0]
    for depth in range(trees.depth + 1):
        left, child = trees.parents == node[:, None], torch.zeros_like(each)
        now, proposed = probabilities[each, node], drawn_from[each, node]
        for rank in range(accept.shape[-1] if depth < trees.depth else 0):
            trying = going & left.any(-1) & (child == 0)
            tried = left.byte().argmax(-1)
            left = left.scatter(1, tried[:, None], False)
            token = trees.tokens[each, tried]
            ratios = now[each, token] / proposed[each, token]
            kept = keeps(accept[:, depth, rank], ratios, trying)
            child = torch.where(kept, tried, child)
            rejected = (trying & ~kept)[:, None]
            now = torch.where(rejected, residual(now, proposed), now)
            if not replacement:
                proposed = torch.where(rejected, without(proposed, token), proposed)
        remaining = torch.where(going[:, None], now, remaining)
        going = going & (child > 0)
        node, depths = torch.where(going, child, node), depths + going
    return node, draw(remaining, decide.gather(1, depths[:, None])[:, 0])


def keeps(points: torch.Tensor, ratios: torch.Tensor, trying: torch.Tensor) -> torch.Tensor:
    """(B,): whether a drawn child is kept where one is tried, with min(1, p / q)."""
    return trying & (points < ratios)


def residual(remaining: torch.Tensor, drawn_from: torch.Tensor) -> torch.Tensor:
    """What is left of the target's distributions, (B, V), after a draw from `drawn_from` was
    rejected: norm(max(0, p - q))."""
    return _normalised((remaining - drawn_from).clamp(min=0), remaining)


def without(probabilities: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(B, V) distributions with one token of each left out, (B,)."""
    return _normalised(probabilities.scatter(1, tokens[:, None], 0.0), probabilities)


def _normalised(left: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """`left` as distributions; `before` where only rounding let a certain token be rejected."""
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, before / before.sum(-1, keepdim=True))
