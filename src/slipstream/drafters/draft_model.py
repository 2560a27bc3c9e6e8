"""Two-model speculative decoding: a small model of the same vocabulary drafts a chain.

Greedy targets get the draft model's argmax; sampled ones get samples together with the exact
distribution they were drawn from. Source: Leviathan et al. 2023, Chen et al. 2023.
"""

import torch

from slipstream.core.errors import InputError
from slipstream.core.masks import causal_mask, tree_mask
from slipstream.core.tree import DraftTree, Proposal
from slipstream.drafters.base import Context, Drafter
from slipstream.targets.compiled import compile_like
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
        compile_like(self.model, target)
        return target

    def begin(self, contexts: list[Context], budget: int) -> None:
        self.cache = self.model.new_cache(contexts[0].cache.capacity, len(contexts))

    def leave(self, kept: list[int]) -> None:
        self.cache.keep_sequences(kept)

    def propose(self, contexts: list[Context], budget: int) -> list[DraftTree]:
        drafted = [context.tokens[-1:] for context in contexts]
        proposals: list[dict[int, Proposal]] = [{} for _ in contexts]
        depths = [self._depth(context, budget) for context in contexts]
        with contexts[0].clock.share("draft"):
            fed = [
                context.tokens[cached:]
                for context, cached in zip(contexts, self.cache.lengths, strict=True)
            ]
            for node in range(max(depths)):
                drafting = [place for place, depth in enumerate(depths) if node < depth]
                logits = self._feed(fed)[drafting]
                fed = [[] for _ in contexts]
                drawn = _drawn(logits, [contexts[place] for place in drafting])
                for place, (token, proposal) in zip(drafting, drawn, strict=True):
                    drafted[place].append(token)
                    fed[place] = [token]
                    if proposal is not None:
                        proposals[place][node] = proposal
            known = [len(context.tokens) for context in contexts]
            self.cache.roll_back(*map(min, self.cache.lengths, known))
        trees = [DraftTree.chain(tokens) for tokens in drafted]
        for tree, own in zip(trees, proposals, strict=True):
            tree.proposals = own
        return trees

    def _depth(self, context: Context, budget: int) -> int:
        """How many tokens to draft."""
        room = self.model.max_positions - len(context.tokens)
        return max(0, min(self.num_tokens, budget - 1, context.max_depth, room))

    def _feed(self, tokens: list[list[int]]) -> torch.Tensor:
        """Feed each sequence its tokens, perhaps none, and commit them; (B, V) logits of what
        follows."""
        cache, device, width = self.cache, self.model.device, max(map(len, tokens))
        ids = torch.tensor([own + [0] * (width - len(own)) for own in tokens], device=device)
        lengths = torch.tensor(cache.lengths, device=device)[:, None]
        positions = lengths + torch.arange(width, device=device)
        mask = None
        masked = self.model.compiled is not None or width > 1 or min(cache.lengths) < cache.slots
        if cache.length and masked:
            causal = causal_mask(width, device).repeat(len(tokens), 1, 1)
            mask = tree_mask(cache.lengths, causal, cache.slots)
        positions = positions.clamp(max=self.model.max_positions - 1)
        rows = self.model.forward(
            ids, positions, mask, cache, repeats=mask is not None and width <= 2
        )
        last = [max(0, len(own) - 1) for own in tokens]
        cache.commit_each([list(range(len(own))) for own in tokens])
        return self.model.logits(rows.hidden[range(len(tokens)), last])


def _drawn(logits: torch.Tensor, contexts: list[Context]) -> list[tuple[int, Proposal | None]]:
    """A token for each context from (B, V) logits, and what it was drawn from if it was."""
    sampling = contexts[0].sampling
    if sampling.greedy:
        return [(token, None) for token in logits.argmax(-1).tolist()]
    probabilities = sampling.probabilities(logits).cpu()
    return [
        (context.randomness.draw(each), Proposal(each))
        for context, each in zip(contexts, probabilities, strict=True)
    ]
