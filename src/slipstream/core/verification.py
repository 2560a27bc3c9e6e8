"""Which of a tree's nodes the target agrees with, and the token that follows them.

Every rule here is exact: greedy output is the target's own, sampled output has the target's
distribution. Sampling goes down the tree level by level; testing whole paths and keeping the
longest would be biased. Sources: Leviathan et al. 2023 (sampled chain), SpecInfer (recursive
rejection over siblings), SPECTRA algorithm 4 (deterministic siblings).
"""

from dataclasses import dataclass

import torch

from slipstream.core.sampling import Randomness
from slipstream.core.tree import DraftTree


@dataclass(frozen=True)
class Verdict:
    """path: accepted nodes from the root (root included); next_token: correction or bonus."""

    path: list[int]
    next_token: int


def verify_greedy(tree: DraftTree, choices: list[int]) -> Verdict:
    """Follow the target's argmax. choices: N token ids, the argmax after each node.

    >>> verify_greedy(DraftTree([7, 1, 2], [-1, 0, 0]), [2, 5, 9])
    Verdict(path=[0, 2], next_token=9)
    """
    path, parents, tokens = [0], tree.parents, tree.tokens
    for node in range(1, len(tokens)):
        if parents[node] == path[-1] and tokens[node] == choices[path[-1]]:
            path.append(node)
    return Verdict(path, choices[path[-1]])


def last_accepted(
    ids: torch.Tensor, parents: torch.Tensor, ancestors: torch.Tensor, choices: torch.Tensor
) -> torch.Tensor:
    """(B,) last accepted nodes: what `verify_greedy` finds, for B trees, wherever the tensors are.

    ids, parents, choices: (B, N), parents -1 for roots (node 0) and for padding; ancestors:
    (B, N, N) of `DraftTree.ancestor_mask`.

    >>> tree = DraftTree([7, 1, 2], [-1, 0, 0])
    >>> ids, parents, choices = torch.tensor([[tree.tokens, tree.parents, [2, 5, 9]]]).unbind(1)
    >>> last_accepted(ids, parents, tree.ancestor_mask()[None], choices).tolist()
    [2]
    """
    agrees = (ids == choices.gather(1, parents.clamp(min=0))) & (parents >= 0)
    agrees[:, 0] = True
    accepted = (agrees[:, None] | ~ancestors).all(-1)
    return (accepted * ancestors.sum(-1)).argmax(-1)


def verify_sampling(
    tree: DraftTree, probabilities: torch.Tensor, randomness: Randomness
) -> Verdict:
    """Sample from the target, keeping drafted tokens where the laws of rejection allow it.

    probabilities: (N, V), the target's distribution after each node (same temperature, top-k and
    top-p as plain sampling). Children are tried in order; the distribution of every emitted token
    is the target's whatever the tree proposes.
    """
    path = [0]
    while True:
        remaining = probabilities[path[-1]].clone()
        children = tree.children(path[-1])
        proposal = tree.proposals.get(path[-1])
        drawn_from = None if proposal is None else proposal.probabilities.clone()
        for child in children:
            token = tree.tokens[child]
            if drawn_from is None:
                accepted = randomness.accept(float(remaining[token]))
            else:
                ratio = float(remaining[token]) / float(drawn_from[token])
                accepted = randomness.accept(min(1.0, ratio))
            if accepted:
                path.append(child)
                break
            remaining = residual(remaining, token, drawn_from)
            if proposal is not None and not proposal.replacement:
                drawn_from = _without(drawn_from, token)
        else:
            return Verdict(path, randomness.draw(remaining))


def residual(remaining: torch.Tensor, token: int, drawn_from: torch.Tensor | None) -> torch.Tensor:
    """What is left of the target's distribution, (V,), after one child was rejected.

    drawn_from: (V,) what the child was drawn from, None for a deterministic child.
    """
    if drawn_from is None:
        return _without(remaining, token)
    return _normalised((remaining - drawn_from).clamp(min=0), remaining)


def _without(probabilities: torch.Tensor, token: int) -> torch.Tensor:
    left = probabilities.clone()
    left[token] = 0
    return _normalised(left, probabilities)


def _normalised(left: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """`left` as a distribution; `before` where only rounding let a certain token be rejected."""
    total = left.sum()
    return left / total if total > 0 else before / before.sum()
