"""Two-model speculative decoding: a small model of the same vocabulary drafts a chain.

Greedy requests get the draft model's argmax; sampled ones get draws together with the distribution
they were drawn from; how far is drafted is `draft_length.py`'s business. The host waits for each
token but the last, and hands it to the model. Source: Leviathan et al. 2023, Chen et al. 2023.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from slipstream.core.sampling import distributions, draw
from slipstream.core.settings import Size
from slipstream.core.transfer import on_device
from slipstream.core.trees import Drawn, Trees
from slipstream.drafters.base import Attached, Drafter, Request, Session, Verified
from slipstream.drafters.draft_length import DraftLength, Grown, Lengths
from slipstream.targets.compiled import compile_like
from slipstream.targets.loading import of_same_vocabulary
from slipstream.targets.reading import CachedModel
from slipstream.targets.target import Target


@dataclass(eq=False)
class DraftModel(Drafter):
    """Drafts up to `num_tokens` tokens a step with `model`, itself a `Target`.

    length: a rule that may end a draft earlier, None for none.
    """

    model: Target
    num_tokens: Size
    length: DraftLength | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.length = self.length or DraftLength()

    def attach(self, target: Target) -> "AttachedDraftModel":
        model = of_same_vocabulary(self.model, target, "drafter.model")
        compile_like(model, target)
        return AttachedDraftModel(target, replace(self, model=model))


class DraftModelSession(Session):
    """The draft model reads along; each request has its own length."""

    def __init__(self, attached: "AttachedDraftModel", requests: Sequence[Request], budget: int):
        self.settings = settings = attached.settings
        longest = max(len(each.tokens) + each.room for each in requests)
        ahead = max(2, settings.num_tokens)
        self.reader = CachedModel(settings.model, longest, len(requests), ahead)
        self.lengths = Lengths(attached.length, len(requests))

    def ask(self, verified: Verified) -> None:
        self.lengths.ask(verified)

    def draft(self, verified: Verified, budget: int) -> Trees:
        model, lengths, requests = self.settings.model, self.lengths, verified.requests
        verified.host()
        depths = lengths.begin([self._room(request, budget) for request in requests])
        texts = [request.tokens for request in requests]
        unread, chain, drawn_from = self.reader.unread(texts), [verified.next_tokens], []
        fed = [own if depth else [] for own, depth in zip(unread, depths, strict=True)]
        for node in range(max(depths)):
            going = [place for place, depth in enumerate(depths) if node < depth]
            if not going:
                break
            with verified.wait() if verified.prompt and not node else nullcontext():
                hidden = self.reader.read(fed)  # with the prompts: a part of the prefill
            logits = model.logits(hidden)
            tokens, probabilities = _chosen(requests, logits, going)
            chain.append(tokens)
            drawn_from.append(probabilities)
            if lengths.rule.looks_at != "nothing":
                grown = Grown(logits[going], tokens[going], hidden[going])
                lengths.look(grown, going, depths, node + 1)
            if node + 1 < max(depths):
                ids = tokens.tolist()
                fed = [[ids[p]] if node + 1 < depth else [] for p, depth in enumerate(depths)]
        self.reader.forget_beyond(list(map(len, texts)))
        lengths.drafted = self._chains(chain, depths, drawn_from)
        return lengths.drafted

    def _chains(self, chain, depths: list[int], drawn_from) -> Trees:
        """Chains of these depths from (B,) tokens of each level."""
        tokens = torch.stack(chain[: 1 + max(depths)], 1)
        width, device = tokens.shape[1], tokens.device
        nodes = torch.arange(width, device=device)
        inside = nodes <= on_device(depths, device)[:, None]
        drawn = None
        if width > 1 and drawn_from[0] is not None:  # nothing is drawn after the last node
            drawn = Drawn(torch.stack([*drawn_from[: width - 1], drawn_from[0]], 1))
        parents = (nodes - 1).masked_fill(~inside, -1)
        return Trees(tokens.masked_fill(~inside, 0), parents, inside.float(), width - 1, drawn)

    def _room(self, request: Request, budget: int) -> int:
        """How many tokens there is room for."""
        room = self.settings.model.max_positions - len(request.tokens)
        return max(0, min(self.settings.num_tokens, budget - 1, request.room - 1, room))

    def keep(self, indices: list[int]) -> None:
        self.lengths.keep(indices)
        self.reader.keep(indices)

    def join(self, other: "DraftModelSession") -> None:
        self.lengths.join(other.lengths)
        self.reader.join(other.reader)


class AttachedDraftModel(Attached):
    draws, session = True, DraftModelSession

    def __init__(self, target: Target, settings: DraftModel):
        super().__init__(target)
        self.settings, self.length = settings, settings.length.attach(settings.model)


def _chosen(
    requests: Sequence[Request], logits: torch.Tensor, going: list[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(B,) tokens from (B, V) logits, and (B, V) what they were drawn from, if they were; with
    numbers of the requests that are `going` on alone."""
    samplings = [request.sampling for request in requests]
    if all(sampling.greedy for sampling in samplings):
        return logits.argmax(-1), None
    probabilities, points = distributions(samplings, logits), torch.zeros(len(requests)).double()
    for place in going:
        points[place] = requests[place].chance.number()
    return draw(probabilities, on_device(points, logits.device)), probabilities
