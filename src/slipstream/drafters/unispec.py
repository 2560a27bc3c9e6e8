"""Trees from what the target last predicted after each token: UNISPEC, and Token Recycling.

The verifying forward predicts tokens after every node, accepted or not. The likeliest ones are
stored for the node's token and become its children in later trees.
Sources: UNISPEC, Algorithm 1; Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference
of Large Language Models with Token Recycling".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Literal

import torch

from slipstream.core.drafts import Draft, grow_by_confidence
from slipstream.core.errors import InputError
from slipstream.core.settings import Below1, PositiveShare, Share, Size
from slipstream.core.transfer import on_device
from slipstream.drafters.base import AttachedHost, Brought, Drafter, Request, Verified, bytes_of
from slipstream.targets.target import Target

ROWS = 128
"""Rows of a prompt whose logits are looked at together."""
READINGS = {"product": mul, "local": min}
"""How confident a node is by its score and its parent's confidence. Algorithm 1 does not say more
than that scores are put side by side: either the scores on a path are multiplied, or each counts
alone, though no node can be drafted without its parent."""
PRIOR = 10.0, 3.0
"""Of proven trust: so much probability claimed before the first token of an answer, so much of it
right."""
Successions = tuple[list[int], list[float]]
"""Tokens that may follow one, most probable first, and how probable each is."""
Store = dict[int, Successions]
"""What the target itself last thought would follow each token, after a row that it verified."""


@dataclass(eq=False)
class UniSpec(Drafter):
    """A tree of stored successors, whose nodes are as confident as the scores on their path say;
    the most confident ones are verified.

    top_k: successors kept of a token, and the most nodes of a level that have children; max_depth:
    of the tree; threshold: least confidence of a node that has children (r), others are verified
    all the same if they are among the most confident. trust: a successor's score is this part of
    the probability that the target gave it, in the place where it did, and the rest of what is
    usual for its rank, `ranks`: UNISPEC trusts wholly (1), Token Recycling, whose tree has a fixed
    shape, not at all (0), "proven" as far as stored probabilities have come true in the answer.
    wide_first_level: the first level also has what else than the root the target thought likely in
    its place, ranked without it (the paper does not leave out the root itself, which would be its
    own likeliest child). prompt: whether the target's predictions within the prompt (its last part,
    if it is long) are stored, too. keep: whether later prompts find what earlier ones stored.
    reading: of the scores on a path, one of `READINGS`.
    """

    top_k: Size
    max_depth: Size
    threshold: Below1
    trust: Share | Literal["proven"]
    ranks: Sequence[PositiveShare]
    wide_first_level: bool
    prompt: bool
    keep: bool
    reading: Literal["product", "local"] = "product"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.ranks) < self.top_k:
            raise InputError("drafter.ranks: give top_k numbers in (0, 1]")
        if sorted(self.ranks, reverse=True) != list(self.ranks):
            raise InputError("drafter.ranks: none may be above the one before")

    def additions(self) -> list[str]:
        # Token Recycling trusts not at all, UNISPEC wholly.
        acting = {"prompt": self.prompt, "trust": self.trust not in (0, 1)}
        return [name for name, acts in acting.items() if acts]

    def attach(self, target: Target) -> "AttachedUniSpec":
        return AttachedUniSpec(target, self)

    def scored(self, successors: Successions, trust: float) -> Successions:
        """Successors with their scores in place of their probabilities."""
        tokens, probabilities = successors
        pairs = zip(probabilities, self.ranks, strict=False)
        return tokens, [trust * own + (1 - trust) * rank for own, rank in pairs]


class AttachedUniSpec(AttachedHost):
    """Each request has a store; kept, all share one."""

    def __init__(self, target: Target, settings: UniSpec):
        super().__init__(target, settings)
        self.keeps = settings.keep
        self.kept: Store = {}

    def state(self, request: Request, budget: int) -> "_Known":
        return _Known(self.kept if self.keeps else {})

    def ask(self, verified: Verified, states: list["_Known"]) -> Brought:
        """The nodes' tokens, (B, N), their likeliest successors and the probabilities of these,
        (B, N, k) each, and (B, N) whether a node counts; of trees their paths as well."""
        trees, each, last = verified.trees, verified.each, verified.last
        if not verified.prompt:
            said = trees.tokens, *self._likeliest(verified, verified.logits), trees.real
            return verified.bring(*said, verified.paths, verified.counts)
        nodes = torch.arange(trees.width, device=last.device).expand_as(trees.tokens)
        if not self.settings.prompt:
            nodes = last[:, None]
        hidden = verified.rows.hidden[each[:, None], nodes]
        # In parts, because a row of logits is long.
        parts = hidden.split(max(1, ROWS // len(hidden)), dim=1)
        best = [self._likeliest(verified, self.target.logits(part)) for part in parts]
        found = (torch.cat(column, 1) for column in zip(*best, strict=True))
        ids = trees.tokens.gather(1, nodes)
        return verified.bring(ids, *found, nodes <= last[:, None])

    def _likeliest(
        self, verified: Verified, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, N, V) -> the likeliest tokens and their probabilities, (B, N, k) each."""
        samplings, logits = [each.sampling for each in verified.requests], logits.float()
        # At low temperatures all but the first have the probability 0, and are told apart here.
        best = logits.topk(min(self.settings.top_k, logits.shape[-1])).indices
        temperatures = [1.0 if own.greedy else own.temperature for own in samplings]
        if set(temperatures) != {1.0}:
            logits = logits / on_device(temperatures, logits.device)[:, None, None]
        return best, logits.softmax(-1).gather(-1, best)

    def learn(
        self, verified: Verified, states: list["_Known"], brought: list[torch.Tensor]
    ) -> None:
        """Store each token's successors: of its last accepted node, else of its likeliest node."""
        ids, tokens, probabilities, counting, *paths = (each.tolist() for each in brought)
        for place, known in enumerate(states):
            known.prove(verified.requests[place].tokens)
            order = [node for node, counts in enumerate(counting[place]) if counts]
            if paths:
                accepted = paths[0][place][: paths[1][place]]
                order = [*(node for node in order[::-1] if node not in accepted), *accepted]
            for node in order:
                known.instead = tokens[place][node], probabilities[place][node]
                known.store[ids[place][node]] = known.instead

    def drafted(self, request: Request, state: "_Known", budget: int) -> Draft:
        settings, trust, root = self.settings, self.settings.trust, request.tokens[-1]
        if trust == "proven":
            trust = state.trust
            state.asked = len(request.tokens), state.store.get(root, ([], []))

        def children(token: int, depth: int) -> Successions:
            stored = settings.scored(state.store.get(token, ([], [])), trust)
            if depth == 1 and settings.wide_first_level:
                others = dict(zip(*state.instead, strict=True))
                others.pop(token, None)
                instead = list(others), list(others.values())
                return _merged(stored, settings.scored(instead, trust))
            return stored

        depth = max(0, min(settings.max_depth, request.room - 1))
        shape = budget, depth, settings.threshold, settings.top_k
        return grow_by_confidence(root, children, *shape, READINGS[settings.reading])

    def memory(self) -> int:
        return bytes_of(each.store for each in self.states)

    def forget(self) -> None:
        self.kept = {}


@dataclass
class _Known:
    """Of one request: its store, and what might have come in the place of the last token. asked: a
    place of the text, and what was stored for it, whose worth is not known yet; claimed: the
    probabilities of such successors, right: how often one of them came."""

    store: Store
    instead: Successions = ([], [])
    asked: tuple[int, Successions] | None = None
    claimed: float = PRIOR[0]
    right: float = PRIOR[1]

    @property
    def trust(self) -> float:
        """What part of stored probabilities has come true.

        >>> known = _Known({}, asked=(2, ([7, 8], [0.75, 0.25])))
        >>> known.prove([1, 2, 8])
        >>> known.trust  # 3 of 10, and 1 of 1
        0.36363636363636365
        """
        return min(1.0, self.right / self.claimed)

    def prove(self, tokens: list[int]) -> None:
        """Take up what came in the place that was asked for."""
        if self.asked is not None:
            place, (successors, probabilities) = self.asked
            self.claimed += sum(probabilities)
            self.right += tokens[place] in successors
            self.asked = None


def _merged(first: Successions, second: Successions) -> Successions:
    """Both lists of tokens as one, each token with its higher probability, most probable first."""
    best = dict(zip(*first, strict=True))
    for token, probability in zip(*second, strict=True):
        best[token] = max(probability, best.get(token, 0.0))
    tokens = sorted(best, key=best.__getitem__, reverse=True)
    return tokens, [best[token] for token in tokens]
