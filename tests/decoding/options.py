"""Every option of Speculative Streaming, and the reference that its output must equal.

The reference knows no cache, tree, drafter or engine: everything is computed again for each token.
"""

from collections.abc import Sequence

import torch
from tests.reference import DraftTree
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core.masks import causal_mask
from slipstream.core.trees import Trees
from slipstream.decoding.request import Batch
from slipstream.drafters.base import Request, Verified
from slipstream.drafters.stream_sessions import StreamSession
from slipstream.drafters.streaming import AttachedStreaming, Streaming
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.target import Target

BOTH_MODES = {
    "paper": dict(),
    **{f"msa_layers_{count}": dict(num_msa_layers=count) for count in (1, 3, 4)},
    **{f"streams_{count}": dict(num_streams=count) for count in (1, 2, 4, 5, 6, 7, 8)},
    **{f"pruning_layer_{layer}": dict(pruning_layer=layer) for layer in (0, 1, 3)},
    **{f"initialisation_{rank}": dict(initialisation_rank=rank) for rank in (1, 3, 24)},
    **{f"attended_{count}": dict(attended_tokens=count) for count in (1, 3)},
    "same_positions": dict(stream_positions="same"),
    "rotated_values": dict(value_rotation=0.01),
    "transitions": dict(transition_rank=3),
    "copying": dict(copy_scores=True),
    "pair_scores": dict(transition_rank=3, copy_scores=True),
    "many": dict(
        num_msa_layers=3,
        num_streams=4,
        pruning_layer=3,
        initialisation_rank=2,
        attended_tokens=2,
        stream_positions="same",
        value_rotation=0.01,
        transition_rank=2,
        copy_scores=True,
    ),
}
LOSSLESS_ALONE = {
    "no_adapters": dict(adapter_rank=0),
    "told_the_root": dict(root_rank=3),
    "skipped_mlp": dict(mlp="adapter"),
    "skipped_mlp_pruned_late": dict(mlp="adapter", pruning_layer=3, root_rank=2),
}
DOUBLED = {
    f"{option}_{number}"
    for option, numbers in {
        "msa_layers": (1, 4),
        "streams": (1, 4, 5, 6, 7),
        "pruning_layer": (0, 1),
        "initialisation": (1, 24),
        "attended": (3,),
    }.items()
    for number in numbers
}
"""Options that differ from others in a number alone: among the full products."""
OPTIONS = {"lossless": BOTH_MODES | LOSSLESS_ALONE, "shared": BOTH_MODES}
SCHEDULES = {"lossless": ("fused", "deferred"), "shared": ("fused",)}
TREES = {
    "root_alone": dict(top_k=2, budget=1),
    "chain": dict(top_k=1, budget=4),
    "full": dict(top_k=2, budget=1 + 2 + 4 + 8),
    "best_first": dict(top_k=3, budget=9),
    "threshold": dict(top_k=3, budget=9, prune_threshold=0.2),
    "cap": dict(top_k=3, budget=9, prune_cap=4),
    "pruned": dict(top_k=3, budget=12, prune_threshold=0.1, prune_cap=3),
    "pruned_chain": dict(top_k=1, budget=4, prune_threshold=0.2, prune_cap=2),
    "pruned_full": dict(top_k=2, budget=1 + 2 + 4 + 8, prune_threshold=0.1, prune_cap=5),
}
PRUNED = [name for name, tree in TREES.items() if {"prune_threshold", "prune_cap"} & tree.keys()]


class Watched(Streaming):
    """Notes, for each forward of one request, the tree that was proposed for it (None for the
    prompt), what pruning left of it, and the logits that decided its tokens."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps: list[tuple[DraftTree | None, DraftTree, torch.Tensor]] = []

    def attach(self, target: Target) -> AttachedStreaming:
        attached = super().attach(target)
        start = attached.start

        def watched(requests: Sequence[Request], budget: int) -> StreamSession:
            self.session, proposed = start(requests, budget), None
            draft = self.session.draft

            def noted(verified: Verified, budget: int) -> Trees:
                nonlocal proposed
                self.steps.append((proposed, one(verified.trees), logits_of(attached, verified)))
                trees = draft(verified, budget)
                proposed = one(trees)
                return trees

            self.session.draft = noted
            return self.session

        attached.start = watched
        return attached

    @property
    def proposed(self) -> list[DraftTree]:
        return [tree for tree, _, _ in self.steps if tree is not None]

    @property
    def verified(self) -> list[DraftTree]:
        return [left for tree, left, _ in self.steps if tree is not None]

    @property
    def pruned(self) -> bool:
        return sum(map(len, self.verified)) < sum(map(len, self.proposed))

    @property
    def logits(self) -> torch.Tensor:
        """(T, V) that decided the tokens."""
        return torch.cat([logits for _, _, logits in self.steps])

    @property
    def deepest(self) -> int:
        """Most drafted tokens accepted in one step."""
        return max(len(logits) - 1 for _, _, logits in self.steps)


def one_number_for_two_depths(monkeypatch) -> None:
    """A fault that controls put in place: tokens of one path do not have numbers of their own."""
    points = Batch.points
    monkeypatch.setattr(
        Batch,
        "points",
        lambda batch, numbers, count: points(batch, numbers, 1).expand(-1, count),
    )


def one(trees: Trees) -> DraftTree:
    """The only tree of a batch of one."""
    (draft,) = trees.drafts()
    return DraftTree(draft.tokens, draft.parents, draft.confidences)


def logits_of(attached: AttachedStreaming, verified: Verified) -> torch.Tensor:
    """(P, V) after the accepted nodes of one request."""
    logits = verified.logits
    if logits is None:
        logits = attached.target.logits(verified.rows.hidden)
    return logits[0, verified.paths[0, : int(verified.counts[0])]]


def drafter_of(speculator: StreamingSpeculator, schedule: str, tree: str) -> tuple[Watched, int]:
    """A drafter of the trees called `tree`, and their budget."""
    arguments = dict(TREES[tree])
    budget = arguments.pop("budget")
    return Watched(speculator, schedule, **arguments), budget


def pair_of(
    mode: str, options: dict, architecture: str = "llama", **changes
) -> tuple[Target, StreamingSpeculator]:
    target = tiny_target(architecture, **changes)
    return target, tiny_speculator(target, seed=2, mode=mode, **options)


@torch.no_grad()
def next_token_logits(
    target: Target, speculator: StreamingSpeculator, texts: torch.Tensor, prompt_length: int
) -> torch.Tensor:
    """(B, T) texts -> (B, V) logits of what follows them, each text anew in one forward.

    Shared mode: every position from the last one of the prompt on carries its streams.
    """
    device = target.device
    texts = texts.to(device)
    if speculator.config.mode == "lossless":
        return target.model(texts).logits[:, -1]
    adapted = speculator.adapted(target)
    (batch, length), first = texts.shape, prompt_length - 1
    positions = torch.arange(length, device=device).expand(batch, -1)
    mask = causal_mask(length, device).expand(batch, 1, -1, -1)
    rows = adapted.embed(texts, positions, mask)
    rows = adapted.run_layers(range(speculator.first_layer), rows, None)
    chosen = torch.arange(first, length, device=device).expand(batch, -1)
    rows = speculator.add_streams(adapted, rows, chosen)
    assert rows.hidden.shape[1] == length + (length - first) * speculator.num_streams
    with speculator.acting_on(adapted, rows):
        hidden = adapted.run_layers(speculator.msa_layers(adapted), rows, None).hidden
    return adapted.logits(hidden[:, length - 1])


def recomputed(
    target: Target, speculator: StreamingSpeculator, prompt: list[int], count: int
) -> tuple[list[int], torch.Tensor]:
    """Greedy decoding without cache, tree or engine: tokens, and the (count, V) logits of each."""
    tokens, logits = list(prompt), []
    for _ in range(count):
        logits.append(next_token_logits(target, speculator, torch.tensor([tokens]), len(prompt)))
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], torch.cat(logits)
