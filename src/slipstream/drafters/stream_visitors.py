"""Where `Streaming` takes part in the verifying forward: streams are added, and nodes dropped."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from slipstream.core.tree import DraftTree, prune
from slipstream.targets.target import Rows

if TYPE_CHECKING:
    from slipstream.drafters.streaming import Streaming


class Streams:
    """A visitor before the MSA layers: keeps the main rows there, (B, R, D), and adds the streams
    if fused."""

    def __init__(self, drafter: "Streaming"):
        self.drafter = drafter
        self.layer = drafter.speculator.first_layer
        self.states: torch.Tensor | None = None

    @contextmanager
    def visit(self, rows: Rows) -> Iterator[Rows]:
        drafter = self.drafter
        self.states = rows.hidden
        chosen = drafter.carriers(rows) if drafter.fused else None
        if chosen is None:
            yield rows
            return
        rows = drafter.drafting.add_streams(rows, chosen)
        with drafter.drafting.acting_on(drafter.target, rows):
            yield rows


class Pruning:
    """A visitor at the pruning layer: drops the nodes that the early exit finds unlikely.

    A batch is not pruned (appendix L): its sequences would keep different rows.
    """

    def __init__(self, drafter: "Streaming"):
        self.drafter = drafter
        self.layer = drafter.speculator.pruning_layer

    @contextmanager
    def visit(self, rows: Rows) -> Iterator[Rows]:
        drafter = self.drafter
        if drafter.trees is not None and len(drafter.trees) == 1:
            (tree,) = drafter.trees
            cap = drafter.prune_cap or len(tree)
            if drafter.prune_threshold > 0 or cap < len(tree):
                transitions = self.transitions(tree, rows.hidden[0, : len(tree)])
                kept = prune(tree, transitions, drafter.prune_threshold, cap)
                if len(kept) < len(tree):
                    rows.keep(kept, self.layer)
                    if self.layer > drafter.streams.layer:
                        drafter.streams.states = drafter.streams.states[:, kept]
        yield rows

    def transitions(self, tree: DraftTree, hidden: torch.Tensor) -> list[float]:
        """N probabilities of each node given its parent, from (N, D) states at this layer."""
        logits = self.drafter.speculator.early_exit_logits(self.drafter.target, hidden).float()
        parents = torch.tensor([0, *tree.parents[1:]], device=logits.device)
        tokens = torch.tensor(tree.tokens, device=logits.device)
        return logits.softmax(-1)[parents, tokens].tolist()
