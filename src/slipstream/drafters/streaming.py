"""Speculative Streaming as a drafter: the target drafts its own next tree.

Schedule *fused*: every node row of the verifying forward carries streams, and those of the last
accepted node become the next tree. Schedule *deferred*: the streams of that node alone run in a
short pass over the MSA layers after verification; they draft from the same states, and may be told
the root (`root_rank`). Which schedule is faster depends on the device.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from slipstream.core.cache import StepCache
from slipstream.core.errors import InputError
from slipstream.core.growth import grow
from slipstream.core.sampling import SIBLINGS
from slipstream.core.settings import Below1, Size
from slipstream.core.trees import Trees
from slipstream.drafters.base import Attached, Drafter
from slipstream.drafters.draft_length import DraftLength, check_length
from slipstream.drafters.stream_sessions import DeferredSession, FusedSession, Pruning
from slipstream.speculators.checkpoint import opened
from slipstream.speculators.streaming.pairs import PairScores
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.lora import merge
from slipstream.targets.packed import RoundedLinear, is_fused, is_packed, matrix_of, rounding_pays
from slipstream.targets.rows import LayerVisitor
from slipstream.targets.target import Target

SCHEDULES = ("auto", "fused", "deferred")
# Where scores of pairs choose among a stream's tokens, so many times `top_k` are looked at, but no
# more than the second: all pairs of two levels' candidates are scored.
CANDIDATES, MOST_CANDIDATES = 8, 256


@dataclass(eq=False)
class Streaming(Drafter):
    """Drafts with the streams of a `StreamingSpeculator`, given itself or as a folder.

    schedule: 'fused', 'deferred', or 'auto' for deferred where the mode allows it (lossless).
    top_k: most children per level; prune_threshold: least transition probability of a node that
    stays in the forward after the early exit; prune_cap: most nodes that stay. Threshold 0 with no
    cap switches pruning off; with a threshold alone all that reach it stay on a CPU, and at most
    half of the tree elsewhere, where the host would have to wait for their number.
    length: a rule that may want a tree less deep, None for none. drawn: where answers are sampled,
    children are drawn from the streams' distributions (Eq. 9), in place of the most probable
    tokens. pairs: whether the scores of pairs that a speculator has are used, an addition of ours.
    """

    speculator: StreamingSpeculator | str | Path
    schedule: Literal[SCHEDULES] = "auto"
    top_k: Size = 4
    prune_threshold: Below1 = 0.0
    prune_cap: Size | None = None
    length: DraftLength | None = None
    drawn: bool = False
    pairs: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.length, ("nothing", "confidence", "logits"), "streaming")
        pruned = self.prune_threshold or self.prune_cap is not None
        if self.drawn and (pruned or self.top_k > SIBLINGS):
            raise InputError(
                f"drafter.drawn: drawn children cannot be pruned, and are at most {SIBLINGS} of a "
                "node; set drafter.prune_threshold=0, prune_cap=null and a smaller top_k"
            )

    def attach(self, target: Target) -> "AttachedStreaming":
        if target.num_parallel > 1:
            raise InputError(
                "drafter: streams need whole layers; use target.device_map in place of "
                "target.tensor_parallel, or drafter=draft_model or drafter=prompt_lookup"
            )
        speculator = opened(self.speculator, target, StreamingSpeculator).placed(target)
        if speculator.config.mode == "lossless":
            schedule = "deferred" if self.schedule == "auto" else self.schedule
            return AttachedStreaming(target, self, speculator, schedule)
        if self.schedule == "deferred":
            raise InputError(
                "drafter.schedule: in shared mode the main stream sees the streams, so they "
                "cannot wait; choose fused"
            )
        kinds = is_packed(target.model), is_fused(target.model)
        target = merge(speculator.adapted(target), *kinds)
        return AttachedStreaming(target, self, speculator, "fused")

    def variants(self, attached: "AttachedStreaming") -> dict[str, Attached]:
        """Both schedules, where the choice is ours."""
        found: dict[str, Attached] = {attached.schedule: attached}
        if self.schedule == "auto" and attached.speculator.config.mode == "lossless":
            found["fused"] = attached.fused
        return found


OWN_MODEL = "output of its own fine-tuned model, not the target's"
"""Said of shared streams wherever they decode."""


class AttachedStreaming(Attached):
    """The streams of `speculator` for one target, drafting by one schedule."""

    def __init__(
        self, target: Target, settings: Streaming, speculator: StreamingSpeculator, schedule: str
    ):
        super().__init__(target)
        self.settings, self.speculator, self.schedule = settings, speculator, schedule
        self.draws, self.adds_rows = settings.drawn, schedule == "fused"
        self.trained_length = speculator.trained_length
        self.session = FusedSession if self.adds_rows else DeferredSession
        additions = speculator.config.additions(schedule)
        additions = [each for each in additions if settings.pairs or each == "root"]
        self.details = f"{schedule}: {', '.join(additions) or 'no additions'}"
        if speculator.shared:
            self.details += f", {OWN_MODEL}"
        self.length = settings.length and settings.length.attach()
        self._made: dict[int, tuple[StreamingSpeculator, list[LayerVisitor]]] = {}
        self.merged = self.pairs = None
        self.head = target.head
        if rounding_pays(self.head, target.dtype):
            self.head = RoundedLinear(matrix_of(self.head), self.head.bias)
        if schedule == "deferred":
            self.merged = speculator.merged_layers(target)
        if speculator.scores_pairs and settings.pairs:
            self.pairs = PairScores(target, speculator.transitions, speculator.copying)

    @cached_property
    def fused(self) -> "AttachedStreaming":
        """The same streams by the other schedule."""
        return AttachedStreaming(self.target, self.settings, self.speculator, "fused")

    def reaching(self, depth: int) -> tuple[StreamingSpeculator, list[LayerVisitor]]:
        """The speculator without the streams that a tree of this depth has no level for, and its
        visitors. In shared mode all streams must run, since the main stream sees them."""
        speculator, target, settings = self.speculator, self.target, self.settings
        count = speculator.num_streams
        if speculator.config.mode != "shared":
            count = max(1, min(count, depth))
        if count not in self._made:
            speculator = speculator.first_streams(count)
            visitors: list[LayerVisitor] = [self.session.visitor(target, speculator)]
            if settings.prune_threshold or settings.prune_cap is not None:
                cut = settings.prune_threshold, settings.prune_cap
                visitors.insert(0, Pruning(target, speculator, *cut))
            self._made[count] = speculator, visitors
        return self._made[count]

    def drafted(
        self,
        cache: StepCache,
        count: int,
        speculator: StreamingSpeculator,
        slots: int,
        budget: int,
        *given: torch.Tensor,
    ) -> Trees:
        """What `grown` returns, from logits made here. given: `count` tensors of the sessions'
        `asked`, for their `states`; then the arguments of `grown` after the logits."""
        asked, given = given[:count], given[count:]
        states = self.session.states(self, cache, speculator, slots, *asked)
        logits = self.head(self.target.norm(states)).to(states.device)
        return self.grown(budget, logits, *given)

    def logits(self, cache: StepCache, _, speculator, slots, *asked) -> torch.Tensor:
        """(B, gamma, V) of the target's own head, from what these streams ask for."""
        return self.target.logits(self.session.states(self, cache, speculator, slots, *asked))

    def grown(
        self,
        budget: int,
        logits: torch.Tensor,
        roots: torch.Tensor,
        room: torch.Tensor,
        texts: torch.Tensor | None = None,
    ) -> Trees:
        """Trees of `budget` nodes; room: (B,), more than the depth of each; for the others see
        `candidates`."""
        found = self.candidates(roots, logits.float(), texts, budget - 1)
        return grow(roots, *found, budget, room - 1)

    def num_candidates(self, logits: torch.Tensor) -> int:
        return min(CANDIDATES * self.settings.top_k, MOST_CANDIDATES, logits.shape[-1])

    def candidates(
        self,
        roots: torch.Tensor,
        logits: torch.Tensor,
        texts: torch.Tensor | None,
        most_children: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Candidate tokens of each level, and how probable each is as a child of those above.

        roots: (B,); logits: (B, gamma, V) of the streams; texts: (B, T), all tokens up to the
        roots, for scores of pairs. Returns tokens (B, gamma, C) and, for each candidate of the
        level above (of the root at first, C times the same), the places of its children among them
        and their probabilities, (B, gamma, C, children). The sampling temperature does not count:
        it sharpens what the target says of a token, not what streams know of the tokens to come.
        """
        logs = logits.log_softmax(-1)
        children = min(self.settings.top_k, most_children)
        if self.pairs is None:
            best = logs.topk(min(children, logs.shape[-1]))
            places = torch.arange(best.values.shape[-1], device=logits.device)
            shape = *best.values.shape, best.values.shape[-1]
            values = best.values.exp().unsqueeze(-2).expand(shape)
            return best.indices, places.expand(shape), values
        best = logs.topk(self.num_candidates(logs))
        first = roots[:, None, None].expand_as(best.indices[:, :1])
        parents = torch.cat([first, best.indices[:, :-1]], dim=1)
        # (B, levels, parents, candidates), in logarithms: scores may be large.
        weights = best.values.unsqueeze(-2) + self.pairs(parents, best.indices, texts)
        # A token that is no candidate keeps its probability.
        others = (1 - best.values.exp().sum(-1)).clamp(min=0).log()[..., None]
        total = torch.logaddexp(weights.logsumexp(-1), others)
        ranked = weights.topk(min(children, weights.shape[-1]))
        return best.indices, ranked.indices, (ranked.values - total.unsqueeze(-1)).exp()
