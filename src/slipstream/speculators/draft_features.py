"""What a small classifier is told about a drafted token: s(x, prefix) of SPRINTER (section 3).

All of it comes from the draft model's own forward. Nothing here knows the target or the labels.
"""

import torch

from slipstream.targets.target import Target

FEATURES = ("hidden", "token", "distribution", "rank")
NUM_SHAPES = 3
NUM_RANKS = 3
# Logarithms that differ by less are those of the same probability, rounded differently.
SAME = 1e-4
# How far behind, in nats, a token is said to be that cannot be drawn.
FARTHEST = 100.0


def shape_of(logs: torch.Tensor) -> torch.Tensor:
    """(..., V) log-probabilities of the draft model -> (..., 3): entropy in nats, the largest
    probability, and how much larger its logarithm is than the second's.

    >>> shape_of(torch.tensor([0.5, 0.5]).log()).tolist()  # log 2, 1/2, 0
    [0.6931471824645996, 0.5, 0.0]
    """
    finite = logs.clamp(min=torch.finfo(logs.dtype).min)  # 0 log 0 is 0
    entropy = -(logs.exp() * finite).sum(-1, keepdim=True)
    first, second = logs.topk(2).values.split(1, dim=-1)
    return torch.cat([entropy, first.exp(), first - second], dim=-1)


def rank_of(log_probabilities: torch.Tensor, shapes: torch.Tensor) -> torch.Tensor:
    """(...) log-probabilities of tokens, and (..., 3) `shape_of` what they were drawn from -> (...,
    3): the probability, how much smaller its logarithm is than the largest's, and 1 for the most
    probable token, else 0.

    >>> logs = torch.tensor([0.75, 0.25]).log()
    >>> rank_of(logs[1], shape_of(logs)).tolist()  # 1/4, log 3, not the first
    [0.25, 1.0986123085021973, 0.0]
    """
    logs = log_probabilities.float()[..., None]
    behind = (shapes[..., 1:2].float().log() - logs).clamp(0, FARTHEST)
    return torch.cat([logs.exp(), behind, (behind < SAME).float()], dim=-1)


class DraftFeatures:
    """Features of a drafted token, of the kinds in `kinds`, in this order:

    'hidden' (D): the draft model's last hidden state, as its LM head takes it, that the token was
    drawn from; it knows the prefix alone. 'token' (E): the token's embedding. 'distribution' (4):
    `shape_of` the distribution it was drawn from, and the token's log-probability there. 'rank'
    (3): `rank_of` the token in this distribution.
    """

    def __init__(self, draft: Target, kinds: tuple[str, ...]):
        self.draft, self.kinds = draft, kinds
        self.reads_distribution = bool({"distribution", "rank"} & set(kinds))
        sizes = (draft.head.in_features, draft.embedding_size, NUM_SHAPES + 1, NUM_RANKS)
        self.size = sum(size for kind, size in zip(FEATURES, sizes, strict=True) if kind in kinds)

    def __call__(
        self,
        normed: torch.Tensor,
        tokens: torch.Tensor,
        shapes: torch.Tensor | None,
        log_probabilities: torch.Tensor | None,
    ) -> torch.Tensor:
        """(..., size) float32 features of drafted tokens.

        normed: (..., D) states after the final norm; tokens: (...); shapes: (..., 3) of `shape_of`;
        log_probabilities: (...) of the tokens in the draft model's distribution; these two None
        where neither 'distribution' nor 'rank' is among the kinds.
        """
        parts = [normed] if "hidden" in self.kinds else []
        if "token" in self.kinds:
            parts.append(self.draft.token_embeddings(tokens))
        if "distribution" in self.kinds:
            parts += [shapes, log_probabilities[..., None]]
        if "rank" in self.kinds:
            parts.append(rank_of(log_probabilities, shapes))
        return torch.cat([part.float() for part in parts], -1)

    def of_drawn(
        self, normed: torch.Tensor, tokens: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """(P, size) of tokens (P,), drawn where the draft model has the states (P, D), after its
        final norm, and the logits (P, V)."""
        shapes = drawn = None
        if self.reads_distribution:
            logs = logits.float().log_softmax(-1)
            shapes, drawn = shape_of(logs), logs.gather(1, tokens[:, None])[:, 0]
        return self(normed, tokens, shapes, drawn)
