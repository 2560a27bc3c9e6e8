"""What a small classifier is told about a drafted token: s(x, prefix) of SPRINTER (section 3).

All of it comes from the draft model's own forward. Nothing here knows the target or the labels.
"""

import torch
from torch import nn

from slipstream.core.errors import InputError
from slipstream.targets.target import Target

FEATURES = ("hidden", "token", "distribution")
NUM_SHAPES = 3


def shape_of(logits: torch.Tensor) -> torch.Tensor:
    """(..., V) draft logits -> (..., 3): entropy in nats, the largest probability, and how much
    larger its logarithm is than the second's.

    >>> shape_of(torch.tensor([2.0, 2.0]).log()).tolist()  # log 2, 1/2, 0
    [0.6931471824645996, 0.5, 0.0]
    """
    logs = logits.float().log_softmax(-1)
    entropy = -torch.where(logs.isneginf(), 0.0, logs.exp() * logs).sum(-1)
    first, second = logs.topk(2).values.unbind(-1)
    return torch.stack([entropy, first.exp(), first - second], dim=-1)


class DraftFeatures:
    """Features of a drafted token, of the kinds in `kinds`, in this order:

    'hidden' (D): the draft model's last hidden state, after its norm, that the token was drawn
    from; it knows the prefix alone. 'token' (E): the token's embedding. 'distribution' (4):
    `shape_of` the distribution it was drawn from, and the token's log-probability there.
    """

    def __init__(self, draft: Target, kinds: tuple[str, ...]):
        unknown = sorted(set(kinds) - set(FEATURES))
        if unknown or not kinds:
            raise InputError(
                f"speculator.features: {', '.join(unknown) or 'none'} given; choose from "
                f"{', '.join(FEATURES)}"
            )
        self.draft, self.kinds = draft, kinds
        sizes = (draft.hidden_size, draft.embedding_size, NUM_SHAPES + 1)
        self.size = sum(size for kind, size in zip(FEATURES, sizes, strict=True) if kind in kinds)

    def __call__(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        shapes: torch.Tensor,
        log_probabilities: torch.Tensor,
    ) -> torch.Tensor:
        """(..., size) float32 features of drafted tokens.

        hidden: (..., D) normed states; tokens: (...); shapes: (..., 3) of `shape_of`;
        log_probabilities: (...) of the tokens in the draft model's distribution.
        """
        parts = {
            "hidden": hidden,
            "token": self.draft.token_embeddings(tokens) if "token" in self.kinds else None,
            "distribution": torch.cat([shapes, log_probabilities[..., None]], -1),
        }
        return torch.cat([parts[kind].float() for kind in FEATURES if kind in self.kinds], -1)


def fold_in(linear: nn.Linear, mean: torch.Tensor, scale: torch.Tensor) -> None:
    """Let `linear`, trained on (features - mean) / scale, take the features themselves."""
    with torch.no_grad():
        linear.weight /= scale
        linear.bias -= linear.weight @ mean
