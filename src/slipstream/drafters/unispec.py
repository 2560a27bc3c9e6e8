"""Trees from what the target last predicted after each token: UNISPEC, and Token Recycling.

The verifying forward predicts a token after every node, also after those that are not accepted.
The `top_k` likeliest ones are stored for the node's token and become its children in later trees.
Sources: UNISPEC, Algorithm 1; Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference
of Large Language Models with Token Recycling".
"""

import torch

from slipstream.core.errors import InputError
from slipstream.core.growth import grow_by_confidence
from slipstream.core.tree import DraftTree
from slipstream.drafters.base import Context, Drafter, Outlook, Step
from slipstream.drafters.successors import Successions, Successors
from slipstream.targets.target import Target

ROWS = 128
"""Rows of a prompt whose logits are looked at together."""


class UniSpec(Drafter):
    """A tree of stored successors, whose nodes are as confident as the product of the scores on
    their path; the most confident ones are verified.

    top_k: successors kept of a token, and the most nodes of a level that have children; max_depth:
    of the tree; threshold: least confidence of a node that has children (r), others are verified
    all the same if they are among the most confident. trust: a successor's score is this part of
    the probability that the target gave it, in the place where it did, and the rest of what is
    usual for its rank, `ranks`: UNISPEC trusts wholly (1), Token Recycling, whose tree has a fixed
    shape, not at all (0). wide_first_level: the first level also has what else than the root the
    target thought likely in its place, ranked without it (the paper does not leave out the root
    itself, which would be its own likeliest child). prompt: whether the target's predictions within
    the prompt (its last part, if it is long) are stored, too. keep: whether later prompts find what
    earlier ones stored.
    """

    def __init__(
        self,
        top_k: int,
        max_depth: int,
        threshold: float,
        trust: float,
        ranks: list[float],
        wide_first_level: bool,
        prompt: bool,
        keep: bool,
    ):
        if top_k < 1 or max_depth < 1:
            raise InputError("drafter.top_k, drafter.max_depth: must be at least 1")
        if not 0 <= threshold < 1:
            raise InputError("drafter.threshold: must be in [0, 1)")
        if not 0 <= trust <= 1:
            raise InputError("drafter.trust: must be between 0 and 1")
        if len(ranks) < top_k or not all(0 < rank <= 1 for rank in ranks):
            raise InputError("drafter.ranks: give top_k numbers in (0, 1]")
        if sorted(ranks, reverse=True) != list(ranks):
            raise InputError("drafter.ranks: none may be above the one before")
        self.trust, self.ranks = trust, list(ranks)
        self.top_k, self.max_depth, self.threshold = top_k, max_depth, threshold
        self.wide_first_level, self.prompt, self.keep = wide_first_level, prompt, keep
        self.stores: list[Successors] = []
        self.used = 0
        self.target: Target | None = None

    def bind(self, target: Target) -> Target:
        if target is not self.target:
            self.stores = []
        self.target = target
        return target

    def begin(self, contexts: list[Context], budget: int) -> None:
        """A store for each prompt of a batch; kept, all prompts share one."""
        k = min(self.top_k, self.target.vocab_size)
        wanted = 1 if self.keep else len(contexts)
        self.used = wanted
        while len(self.stores) < wanted:
            self.stores.append(Successors(self.target.vocab_size, k))
        for place, context in enumerate(contexts):
            store = self.stores[0 if self.keep else place]
            if not self.keep:
                store.clear()
            context.state = _Known(store)

    @property
    def store_bytes(self) -> int:
        return sum(store.nbytes for store in self.stores[: self.used])

    def forget(self) -> None:
        for store in self.stores:
            store.clear()

    def foresee(self, contexts: list[Context], outlook: Outlook) -> tuple[torch.Tensor, ...]:
        """The likeliest tokens after each node, and their probabilities: (B, N, k) each."""
        sampling, clock = contexts[0].sampling, contexts[0].clock
        temperature = 1.0 if sampling.greedy else sampling.temperature
        if outlook.logits is not None:
            with clock.share("draft"):
                return self._likeliest(outlook.logits, temperature)
        with clock.share("prefill"):
            hidden = outlook.rows.hidden[:, : outlook.ids.shape[1]]
            if not self.prompt:
                hidden = hidden[torch.arange(len(hidden)), outlook.last][:, None]
            # In parts, because a row of logits is long.
            parts = hidden.split(max(1, ROWS // len(hidden)), dim=1)
            best = [self._likeliest(self.target.logits(part), temperature) for part in parts]
            tokens, probabilities = zip(*best, strict=True)
            return torch.cat(tokens, dim=1), torch.cat(probabilities, dim=1)

    def _likeliest(
        self, logits: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, N, V) -> the likeliest tokens and their probabilities, (B, N, k) each."""
        best = (logits.float() / temperature).softmax(-1).topk(min(self.top_k, logits.shape[-1]))
        return best.indices, best.values

    def observe(self, context: Context, step: Step) -> None:
        with context.clock.share("draft"):
            tokens, probabilities = (tensor.numpy() for tensor in step.foreseen)
            nodes = step.tree.tokens
            last = step.path[-1]
            if len(tokens) < len(nodes):  # of the prompt, its last token alone
                nodes, last = nodes[-1:], 0
            tokens, probabilities = tokens[: len(nodes)], probabilities[: len(nodes)]
            known: _Known = context.state
            # The last word on a token: of accepted nodes the latest, else the likeliest.
            accepted = step.path if len(tokens) > 1 else [0]
            others = sorted(set(range(len(nodes))) - set(accepted), reverse=True)
            order = [*others, *accepted]
            ids = [nodes[node] for node in order]
            known.store.update(ids, tokens[order], probabilities[order])
            known.instead = tokens[last].tolist(), probabilities[last].tolist()

    def propose(self, contexts: list[Context], budget: int) -> list[DraftTree]:
        with contexts[0].clock.share("draft"):
            return [self._grown(context, budget) for context in contexts]

    def _grown(self, context: Context, budget: int) -> DraftTree:
        known: _Known = context.state

        def children(token: int, depth: int) -> Successions:
            stored = self.scored(known.store.of(token))
            if depth == 1 and self.wide_first_level:
                return _merged(stored, self.scored(known.instead_of(token)))
            return stored

        depth = min(self.max_depth, context.max_depth)
        return grow_by_confidence(
            context.tokens[-1], children, budget, depth, self.threshold, self.top_k
        )

    def scored(self, successors: Successions) -> Successions:
        """Successors with their scores in place of their probabilities."""
        tokens, probabilities = successors
        pairs = zip(probabilities, self.ranks, strict=False)
        return tokens, [self.trust * own + (1 - self.trust) * rank for own, rank in pairs]


class _Known:
    """Of one prompt: its store, and what might have come in the place of the last token."""

    def __init__(self, store: Successors):
        self.store = store
        self.instead: Successions = [], []

    def instead_of(self, root: int) -> Successions:
        pairs = [(one, share) for one, share in zip(*self.instead, strict=True) if one != root]
        return [token for token, _ in pairs], [share for _, share in pairs]


def _merged(first: Successions, second: Successions) -> Successions:
    """Both lists of tokens as one, each token with its higher probability, most probable first."""
    best = dict(zip(*first, strict=True))
    for token, probability in zip(*second, strict=True):
        best[token] = max(probability, best.get(token, 0.0))
    tokens = sorted(best, key=best.__getitem__, reverse=True)
    return tokens, [best[token] for token in tokens]
