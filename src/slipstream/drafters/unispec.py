"""Trees from what the target last predicted after each token: UNISPEC, and Token Recycling.

The verifying forward predicts a token after every node, also after those that are not accepted.
The `top_k` likeliest ones are stored for the node's token and become its children in later trees.
Sources: UNISPEC, Algorithm 1; Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference
of Large Language Models with Token Recycling".
"""

from operator import mul

import torch

from slipstream.core.drafts import Draft, grow_by_confidence
from slipstream.core.errors import InputError
from slipstream.core.transfer import on_device
from slipstream.drafters.base import AttachedHost, Drafter, HostSession, Request, Verified
from slipstream.drafters.successors import Successions, Successors
from slipstream.targets.target import Target

ROWS = 128
"""Rows of a prompt whose logits are looked at together."""


READINGS = {"product": mul, "local": min}
"""How confident a node is by its score and its parent's confidence. Algorithm 1 does not say more
than that scores are put side by side: either the scores on a path are multiplied, or each counts
alone, though no node can be drafted without its parent."""


class UniSpec(Drafter):
    """A tree of stored successors, whose nodes are as confident as the scores on their path say;
    the most confident ones are verified.

    top_k: successors kept of a token, and the most nodes of a level that have children; max_depth:
    of the tree; threshold: least confidence of a node that has children (r), others are verified
    all the same if they are among the most confident. trust: a successor's score is this part of
    the probability that the target gave it, in the place where it did, and the rest of what is
    usual for its rank, `ranks`: UNISPEC trusts wholly (1), Token Recycling, whose tree has a fixed
    shape, not at all (0). wide_first_level: the first level also has what else than the root the
    target thought likely in its place, ranked without it (the paper does not leave out the root
    itself, which would be its own likeliest child). prompt: whether the target's predictions within
    the prompt (its last part, if it is long) are stored, too. keep: whether later prompts find what
    earlier ones stored. reading: of the scores on a path, one of `READINGS`.
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
        reading: str = "product",
    ):
        if reading not in READINGS:
            raise InputError(f"drafter.reading: must be one of {', '.join(READINGS)}")
        self.reading = reading
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

    def attach(self, target: Target) -> "AttachedUniSpec":
        return AttachedUniSpec(target, self)

    def scored(self, successors: Successions) -> Successions:
        """Successors with their scores in place of their probabilities."""
        tokens, probabilities = successors
        pairs = zip(probabilities, self.ranks, strict=False)
        return tokens, [self.trust * own + (1 - self.trust) * rank for own, rank in pairs]


class UniSpecSession(HostSession):
    """Each request has a store, and what the target said in the place of its last token."""

    attached: "AttachedUniSpec"

    def ask(self, verified: Verified) -> None:
        """The nodes' tokens, (B, N), their likeliest successors and the probabilities of these,
        (B, N, k) each, and (B, N) whether a node counts; of trees their paths as well."""
        trees, each, last = verified.trees, verified.each, verified.last
        if not verified.prompt:
            said = trees.tokens, *self._likeliest(verified.logits), trees.real
            self._said = verified.bring(*said, verified.paths, verified.counts)
            return
        nodes = torch.arange(trees.width, device=last.device).expand_as(trees.tokens)
        if not self.attached.settings.prompt:
            nodes = last[:, None]
        hidden = verified.rows.hidden[each[:, None], nodes]
        # In parts, because a row of logits is long.
        parts = hidden.split(max(1, ROWS // len(hidden)), dim=1)
        best = [self._likeliest(self.attached.target.logits(part)) for part in parts]
        found = (torch.cat(column, 1) for column in zip(*best, strict=True))
        ids = trees.tokens.gather(1, nodes)
        self._said = verified.bring(ids, *found, nodes <= last[:, None])

    def _likeliest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, N, V) -> the likeliest tokens and their probabilities, (B, N, k) each."""
        temperatures = [request.sampling.temperature or 1.0 for request in self.requests]
        if set(temperatures) != {1.0}:
            logits = logits.float() / on_device(temperatures, logits.device)[:, None, None]
        best = logits.float().softmax(-1).topk(min(self.attached.settings.top_k, logits.shape[-1]))
        return best.indices, best.values

    def learn(self, verified: Verified) -> None:
        """The last word on a token: of accepted nodes the latest, else the likeliest."""
        ids, tokens, probabilities, counting, *paths = (each.numpy() for each in self._said())
        for place, known in enumerate(self.states):
            order = counting[place].nonzero()[0]
            if paths:
                accepted = paths[0][place, : paths[1][place]]
                others = [node for node in order[::-1].tolist() if node not in accepted]
                order = [*others, *accepted.tolist()]
            own = tokens[place, order], probabilities[place, order]
            known.store.update(ids[place, order].tolist(), *own)
            known.instead = own[0][-1].tolist(), own[1][-1].tolist()

    def drafted(self, request: Request, state: "_Known", budget: int) -> Draft:
        settings = self.attached.settings

        def children(token: int, depth: int) -> Successions:
            stored = settings.scored(state.store.of(token))
            if depth == 1 and settings.wide_first_level:
                return _merged(stored, settings.scored(state.instead_of(token)))
            return stored

        depth = max(0, min(settings.max_depth, request.room - 1))
        root = request.tokens[-1]
        shape = budget, depth, settings.threshold, settings.top_k
        return grow_by_confidence(root, children, *shape, READINGS[settings.reading])


class AttachedUniSpec(AttachedHost):
    """Each request has a store; kept, all share one."""

    session = UniSpecSession

    def __init__(self, target: Target, settings: UniSpec):
        super().__init__(target, settings)
        self.keeps = settings.keep
        self.kept: Successors | None = None

    def state(self, request: Request, budget: int) -> "_Known":
        vocabulary = self.target.vocab_size
        store = self.kept or Successors(vocabulary, min(self.settings.top_k, vocabulary))
        if self.keeps:
            self.kept = store
        return _Known(store)

    def memory(self) -> int:
        return sum({id(each.store): each.store.nbytes for each in self.states}.values())

    def forget(self) -> None:
        self.kept = None


class _Known:
    """Of one request: its store, and what might have come in the place of the last token."""

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
