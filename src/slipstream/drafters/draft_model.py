"""Two-model speculative decoding: a small model of the same vocabulary drafts a chain.

Greedy targets get the draft model's argmax; sampled ones get samples together with the exact
distribution they were drawn from. Source: Leviathan et al. 2023, Chen et al. 2023.
"""

import torch

from slipstream.core.errors import InputError
from slipstream.core.tree import DraftTree, Proposal
from slipstream.drafters.base import Context, Drafter
from slipstream.targets.loading import vocabulary_of
from slipstream.targets.target import Target


class DraftModel(Drafter):
    """Drafts up to `num_tokens` tokens a step with `model`, itself a `Target`."""

    def __init__(self, model: Target, num_tokens: int):
        if num_tokens < 1:
            raise InputError("drafter.num_tokens: must be at least 1")
        self.model, self.num_tokens = model, num_tokens
        self.cache = None

    def bind(self, target: Target) -> Target:
        if target.vocab_size != self.model.vocab_size or vocabulary_of(target) != vocabulary_of(
            self.model
        ):
            raise InputError(
                f"drafter.model: {self.model.name or 'the draft model'} has another vocabulary "
                "than the target; choose a draft model with the target's tokenizer"
            )
        return target

    def begin(self, context: Context) -> None:
        self.cache = self.model.new_cache(context.cache.capacity)

    def propose(self, context: Context, budget: int) -> DraftTree:
        length = min(self.num_tokens, budget - 1, context.max_depth)
        length = min(length, self.model.max_positions - len(context.tokens))
        drafted = [context.tokens[-1]]
        proposals: dict[int, Proposal] = {}
        with context.clock.share("draft"):
            rows = context.tokens[self.cache.length :]
            for node in range(length):
                logits = self._next_logits(rows)
                if context.sampling.greedy:
                    token = int(logits.argmax())
                else:
                    probabilities = context.sampling.probabilities(logits)
                    proposals[node] = Proposal(probabilities.cpu())
                    token = context.randomness.draw(probabilities)
                drafted.append(token)
                rows = [token]
            self.cache.roll_back(min(self.cache.length, len(context.tokens)))
        tree = DraftTree.chain(drafted)
        tree.proposals = proposals
        return tree

    def _next_logits(self, tokens: list[int]) -> torch.Tensor:
        """Feed `tokens` (uncached so far) and commit them; (V,) logits of what follows."""
        start, count = self.cache.length, len(tokens)
        device = self.model.device
        mask = None
        if start and count > 1:
            mask = torch.ones(count, start + count, dtype=torch.bool, device=device).tril(start)
            mask = mask[None, None]
        rows = self.model.forward(
            torch.tensor([tokens], device=device),
            torch.arange(start, start + count, device=device)[None],
            mask,
            self.cache,
        )
        self.cache.commit([(range(self.model.num_layers), list(range(count)))])
        return self.model.logits(rows.hidden[0, -1])
