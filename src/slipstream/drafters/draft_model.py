"""Two-model speculative decoding: a small model of the same vocabulary drafts a chain.

Greedy targets get the draft model's argmax; sampled ones get samples together with the exact
distribution they were drawn from; how far is drafted is `draft_length.py`'s business. Source:
Leviathan et al. 2023, Chen et al. 2023.
"""

import torch

from slipstream.core.errors import InputError
from slipstream.core.tree import DraftTree, Proposal
from slipstream.drafters.base import Context, Drafter, Step
from slipstream.drafters.draft_length import DraftLength, Drawn
from slipstream.targets.compiled import compile_like
from slipstream.targets.loading import check_vocabularies
from slipstream.targets.reading import Reader
from slipstream.targets.target import Target


class DraftModel(Drafter):
    """Drafts up to `num_tokens` tokens a step with `model`, itself a `Target`.

    length: a rule that may end a draft earlier, None for none.
    """

    draws = True

    def __init__(self, model: Target, num_tokens: int, length: DraftLength | None = None):
        if num_tokens < 1:
            raise InputError("drafter.num_tokens: must be at least 1")
        self.model, self.num_tokens = model, num_tokens
        self.length = length or DraftLength()
        self.reader = Reader(model)
        self.drafted: list[DraftTree] | None = None

    def bind(self, target: Target) -> Target:
        check_vocabularies(target, self.model, "drafter.model")
        compile_like(self.model, target)
        self.length.bind(self.model)
        return target

    def begin(self, contexts: list[Context], budget: int) -> None:
        self.reader.begin(contexts[0].cache.capacity, len(contexts))
        self.length.begin(len(contexts))
        self.drafted = None

    def forget(self) -> None:
        self.length.forget()

    def leave(self, kept: list[int]) -> None:
        self.reader.leave(kept)
        self.length.leave(kept)

    def observe(self, context: Context, step: Step) -> None:
        if self.drafted is not None:  # not of the prefill, which drafts nothing
            own = self.drafted[step.sequence]
            self.length.observe(step.sequence, len(own) - 1, own.agreement(step.answer))

    def propose(self, contexts: list[Context], budget: int) -> list[DraftTree]:
        drafted = [context.tokens[-1:] for context in contexts]
        proposals: list[dict[int, Proposal]] = [{} for _ in contexts]
        depths = [
            min(self._depth(context, budget), self.length.limit(place))
            for place, context in enumerate(contexts)
        ]
        self.length.start()
        with contexts[0].clock.share("draft"):
            fed = self.reader.unread([context.tokens for context in contexts])
            node = 0
            while drafting := [place for place, depth in enumerate(depths) if node < depth]:
                hidden = self.reader.read(fed)[drafting]
                logits = self.model.logits(hidden)
                fed = [[] for _ in contexts]
                drawn = _drawn(logits, [contexts[place] for place in drafting])
                for place, (token, proposal) in zip(drafting, drawn, strict=True):
                    drafted[place].append(token)
                    fed[place] = [token]
                    if proposal is not None:
                        proposals[place][node] = proposal
                tokens = [token for token, _ in drawn]
                stops = self.length.stops(Drawn(drafting, logits, tokens, hidden))
                node += 1
                for place, stop in zip(drafting, stops, strict=True):
                    depths[place] = node if stop else depths[place]
                    fed[place] = fed[place] if node < depths[place] else []
            self.reader.forget_beyond([len(context.tokens) for context in contexts])
        trees = self.drafted = [DraftTree.chain(tokens) for tokens in drafted]
        for tree, own in zip(trees, proposals, strict=True):
            tree.proposals = own
        return trees

    def _depth(self, context: Context, budget: int) -> int:
        """How many tokens there is room for."""
        room = self.model.max_positions - len(context.tokens)
        return max(0, min(self.num_tokens, budget - 1, context.max_depth, room))


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
