"""Medusa-style heads, as a comparison for streams: each guesses one future token from the last
hidden state of the present one alone (Cai et al., 2024, section 3.1).

Trained here on collected states, through the target's own frozen LM head: enough to see what a
context-independent guess can and cannot know. Not a drafter.
"""

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.targets.target import Target


class MedusaHeads(nn.Module):
    """Head j: h + SiLU(W_j h + b_j), then the target's norm and LM head; W_j, b_j zero at first."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, width) for _ in range(num_heads))
        for head in self.heads:
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., D) states after the last layer -> (..., num_heads, D)."""
        return torch.stack([hidden + F.silu(head(hidden)) for head in self.heads], dim=-2)


def train_heads(
    target: Target,
    hidden: torch.Tensor,
    futures: torch.Tensor,
    steps: int,
    batch_size: int = 512,
    learning_rate: float = 1e-3,
) -> MedusaHeads:
    """Heads for (M, D) states whose next tokens but one, two ... are `futures`, (M, num_heads)."""
    heads = MedusaHeads(hidden.shape[1], futures.shape[1]).to(hidden)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=learning_rate)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(hidden), (batch_size,), generator=generator)
        with torch.enable_grad():
            logits = target.logits(heads(hidden[rows]))
            loss = F.cross_entropy(logits.float().flatten(0, 1), futures[rows].flatten())
            gradients = torch.autograd.grad(loss, list(heads.parameters()))
        for parameter, gradient in zip(heads.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return heads.requires_grad_(False)
