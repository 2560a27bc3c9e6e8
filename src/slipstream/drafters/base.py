"""What the engine asks of a drafter, and what it tells it.

A drafter is one file and one YAML. It proposes a tree for each prompt, may take part in the
verifying forward through its `visitors`, and is told what was accepted. It never changes what is
emitted: verification is the engine's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.core.cache import StepCache
from slipstream.core.clock import Clock
from slipstream.core.sampling import Randomness, Sampling
from slipstream.core.transfer import on_device
from slipstream.core.tree import DraftTree
from slipstream.targets.target import LayerVisitor, Rows, Target


@dataclass
class Context:
    """What is known while one prompt is being answered.

    tokens: prompt and answer so far; the last one is the root of the next tree. cache, sampling,
    clock: of the whole batch. max_depth: how many tokens beyond the root can still be used.
    state: the drafter's own.
    """

    tokens: list[int]
    cache: StepCache
    sampling: Sampling
    randomness: Randomness
    clock: Clock = field(default_factory=Clock)
    max_depth: int = 0
    state: Any = None


@dataclass(frozen=True)
class Outlook:
    """Where the accepted paths of B sequences end, as tensors on the device: the host may not know
    it yet.

    rows: of the forward; ids: (B, N) tokens of its node rows; starts: how many tokens of each
    context come before them; paths: (B, N), whether a node is accepted; last: (B,) the last
    accepted nodes; tokens: (B,) what follows them; sees: (B, K), which cached slots these nodes
    see, their own included; seen: (B, K) positions of these slots, None for 0, 1, 2 and so on.
    logits: (B, N, V) after the nodes, None in a prefill. Sequences whose prompt is not through yet
    hold something meaningless.
    """

    rows: Rows
    ids: torch.Tensor
    starts: list[int]
    paths: torch.Tensor
    last: torch.Tensor
    tokens: torch.Tensor
    sees: torch.Tensor
    seen: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def texts(self, contexts: list["Context"]) -> torch.Tensor:
        """(B, T): all tokens of each sequence up to `tokens`, with -1 on both sides."""
        known = [
            context.tokens[:start] for context, start in zip(contexts, self.starts, strict=True)
        ]
        longest = max(map(len, known))
        known = [[-1] * (longest - len(text)) + text for text in known]
        order = self.paths.int().argsort(dim=-1, descending=True, stable=True)
        ends = self.paths.sum(-1, keepdim=True)
        accepted = self.ids.gather(1, order)
        accepted = accepted.masked_fill(
            torch.arange(order.shape[1], device=order.device) >= ends, -1
        )
        accepted = torch.nn.functional.pad(accepted, (0, 1), value=-1)
        accepted = accepted.scatter(1, ends, self.tokens[:, None])
        return torch.cat([on_device(known, order.device).long(), accepted], 1)


@dataclass(frozen=True)
class Step:
    """One verified forward, as one of its sequences sees it.

    tree: as verified (pruned nodes gone); path: accepted nodes of it, root included; next_token:
    what follows; rows: the forward's result, nodes first, then rows the visitor added (prefill is
    a step, too: a chain of the prompt's last tokens, all accepted); logits: (N, V) of the nodes, or
    (1, V) of the last prompt token; sequence: its place in `rows`; foreseen: what `foresee`
    returned, this sequence's part of each.
    """

    tree: DraftTree
    path: list[int]
    next_token: int
    rows: Rows
    logits: torch.Tensor
    sequence: int = 0
    foreseen: tuple[torch.Tensor, ...] = ()

    @property
    def answer(self) -> list[int]:
        """What the target went on with after the root."""
        return [*(self.tree.tokens[node] for node in self.path[1:]), self.next_token]


class Drafter:
    """Base of all drafters; a plain one needs `propose` alone.

    exact: whether outputs keep the target's distribution (all verified drafters do). visitors: its
    part in the verifying forward, if any. mergeable: whether its trees may be verified as a part
    of larger ones; draws: whether they hold drawn tokens where the target's are. keep: whether
    later prompts find what earlier ones stored. store_bytes: memory of what it looks drafts up in,
    for the last batch of prompts.
    """

    exact, mergeable, draws = True, True, False
    visitors: Sequence[LayerVisitor] = ()
    keep = False
    store_bytes = 0

    def bind(self, target: Target) -> Target:
        """Called when an engine is made: check that the drafter fits, prepare what it needs.

        Returns the target that verifies: the given one, unless the drafter was trained together
        with a fine-tuned copy of it (shared mode).
        """
        return target

    def ways(self) -> dict[str, "Drafter"]:
        """What a calibration chooses between: itself alone, or variants; called once bound."""
        return {type(self).__name__: self}

    def begin(self, contexts: list[Context], budget: int) -> None:
        """Called before the prefill of a batch of prompts, whose trees will have up to `budget`
        nodes."""

    def forget(self) -> None:
        """Forget what earlier prompts taught: stores that are kept, lengths, records."""

    def extra_rows(self, budget: int) -> int:
        """How many rows it may stage in a forward or a draft beyond the tree's `budget` nodes."""
        return 0

    def propose(self, contexts: list[Context], budget: int) -> list[DraftTree]:
        """A tree of at most `budget` nodes for each context, with its last token as the root."""
        raise NotImplementedError

    def replaced(self, trees: list[DraftTree]) -> None:
        """Called after `propose` when other trees are verified in place of those that it proposed:
        parts of them, and of others' trees."""

    def foresee(self, contexts: list[Context], outlook: Outlook) -> tuple[torch.Tensor, ...]:
        """Called after every forward, prefill included: work for the next trees that the device can
        do while the host still waits for the verdicts.

        What it returns, (B, ...) each, comes to the host together with them, for `observe`.
        """
        return ()

    def observe(self, context: Context, step: Step) -> None:
        """Called for each context that goes on, after every forward, prefill included, with the
        accepted path committed."""

    def leave(self, kept: list[int]) -> None:
        """Called when only these sequences of the batch go on (ascending)."""
