"""One tree of several drafters' trees, under one budget: each node as confident as it has proven.
docs/drafters.md tells how (Combination); all of it happens on the device.

Counts are by the claims of all drafters together, because a token that one of them is sure of means
less where another, which knows the text better, has named others.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F

from slipstream.core.transfer import on_device
from slipstream.core.trees import Trees, merge, most_probable
from slipstream.core.verification import compared
from slipstream.drafters.base import Request, Verified
from slipstream.drafters.several import AttachedSeveral, Several, SeveralSession
from slipstream.targets.target import Target

# Kinds of confidence of one drafter that are told apart.
BINS = 3
# The drafters' claims count as much as tests in which so many tokens were right.
TRUST = 3.0
# What all prompts have shown counts as much as tests in this one that expected so many right.
PROMPT_TRUST = 1.0
# Tokens that the first drafter has not named are believed so much, to begin with, in each prompt.
# The four were measured on validation prompts, streams being the first.
DOUBT = 0.3
# Confidences are float32, and shares such as 2/3 are bounds of a bin.
ROUNDING = 1e-5


class Combined(Several):
    """Merges the trees of `drafters`, by name, the one that is trusted most first, None where one
    is left out."""

    def attach(self, target: Target) -> AttachedSeveral:
        target, parts = self.attached_parts(target)
        new_record = partial(Record, len(parts), target.device)
        return AttachedSeveral(target, parts, new_record, CombinedSession)


class CombinedSession(SeveralSession):
    """trees: the last ones of all drafters together; claims: (B, M, drafters), what each said of
    their nodes; prompts: how well tokens do in each."""

    def __init__(self, attached: AttachedSeveral, requests: Sequence[Request], budget: int):
        super().__init__(attached, requests, budget)
        self.prompts = PromptRecords(len(requests), attached.target.device)
        self.trees: Trees | None = None
        self.claims: torch.Tensor | None = None

    def draft(self, verified: Verified, budget: int) -> Trees:
        if self.trees is not None:
            tested, right = outcomes(self.trees, verified.decided)
            expected = self.attached.record.proven(self.claims)
            self.prompts.count(self.claims, tested, right, expected)
            self.attached.record.count(self.claims, tested, right)
        drafted = [session.draft(verified, budget) for session in self.sessions.values()]
        self.trees, self.claims = together(drafted)
        proven = self.attached.record.proven(self.claims)
        return chosen(self.trees, proven * self.prompts.correction(self.claims), budget)

    def keep(self, indices: list[int]) -> None:
        super().keep(indices)
        index = on_device(indices, self.claims.device)
        self.trees, self.claims = self.trees.only(indices), self.claims[index]
        self.prompts.keep(index)

    def join(self, other: "CombinedSession") -> None:
        super().join(other)
        self.trees = self.trees.join(other.trees)
        padded = [
            F.pad(claims, (0, 0, 0, self.trees.width - claims.shape[1]))
            for claims in (self.claims, other.claims)
        ]
        self.claims = torch.cat(padded)
        self.prompts.join(other.prompts)


def together(trees: Sequence[Trees]) -> tuple[Trees, torch.Tensor]:
    """The trees merged, of M nodes, and what each drafter claims of them, (B, M, drafters) float64:
    how probable a node is given its parent, 0 where it has named others, -1 where none.

    >>> from slipstream.core.drafts import Draft
    >>> one = Trees.of([Draft([7, 1, 2], [-1, 0, 1], [1.0, 0.8, 0.4])])
    >>> other = Trees.of([Draft([7, 1], [-1, 0], [1.0, 0.6])])
    >>> together([one, other])[1][0, 1:3].tolist()
    [[0.8, 0.6], [0.5, -1.0]]
    """
    (both, now), count = merge(trees), len(trees)
    confidences = torch.cat([tree.confidences for tree in trees], 1).double()
    below = torch.cat([tree.parents for tree in trees], 1) >= 0
    starts = [0, *accumulate(tree.width for tree in trees)]
    above = [tree.parents_or_root + start for tree, start in zip(trees, starts, strict=False)]
    drafter = [torch.full_like(tree.parents, place) for place, tree in enumerate(trees)]
    above, drafter = torch.cat(above, 1), torch.cat(drafter, 1)
    # Below a node that is certainly wrong all are: 0 / 0.
    claim = (confidences / confidences.gather(1, above)).nan_to_num(0.0).clamp(max=1)
    # Of a table (B, M + 1, drafters) the last nodes are for padding.
    nodes, parents = (
        place.masked_fill(~below, both.width) * count + drafter
        for place in (now, now.gather(1, above))
    )
    names = now.new_zeros(len(both), (both.width + 1) * count).scatter(1, parents, 1)
    of_parents = both.parents_or_root[..., None].expand(-1, -1, count)
    silent = names.unflatten(1, (-1, count)).gather(1, of_parents).double() - 1
    table = F.pad(silent.flatten(1), (0, count)).scatter_reduce(1, nodes, claim, "amax")
    return both, table.unflatten(1, (-1, count))[:, :-1]


def chosen(trees: Trees, probabilities: torch.Tensor, budget: int) -> Trees:
    """The most confident nodes, as many as `budget` has room for; probabilities: (B, M), of each
    node given its parent, more than 1 counts as 1."""
    along = torch.where(trees.ancestors, probabilities.clamp(max=1)[:, None], 1.0)
    along[:, :, 0] = 1.0
    trees.confidences = along.prod(-1).masked_fill(~trees.real, 0.0)
    return trees.select(most_probable(trees, budget))


def outcomes(trees: Trees, answers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, M) which nodes are children of nodes that the target reached, and which were right.

    answers: (B, T), what it went on with after the roots, -1 for padding.

    >>> from slipstream.core.drafts import Draft
    >>> tree = Trees.of([Draft([7, 1, 2, 3], [-1, 0, 1, 0])])
    >>> [nodes.int().tolist() for nodes in outcomes(tree, torch.tensor([[1, 5]]))]
    [[[0, 1, 1, 1]], [[0, 1, 0, 0]]]
    """
    wanted, right = compared(trees, answers)
    tested = (trees.depths > 0) & (wanted >= 0) & right.gather(1, trees.parents_or_root)
    return tested, tested & right


class Record:
    """How often tokens of each kind were right, and should have been by what was claimed: two
    tables, with an entry for each combination of the drafters' kinds of confidence.

    >>> record, claims = Record(2, torch.device("cpu")), torch.tensor([[[0.6, -1.0]] * 4]).double()
    >>> record.proven(claims)[0, 0].item()
    0.6
    >>> record.count(claims, torch.tensor([[True] * 4]), torch.tensor([[True] + [False] * 3]))
    >>> record.proven(claims)[0, 0].item()  # 3 + 1 right of 3 + 4 * 0.6
    0.4444
    """

    def __init__(self, num_drafters: int, device: torch.device):
        kinds = (BINS + 2) ** num_drafters
        self.right, self.claimed = torch.zeros(2, kinds, dtype=torch.float64, device=device)

    def count(self, claims: torch.Tensor, tested: torch.Tensor, right: torch.Tensor) -> None:
        """Count nodes with (B, M, drafters) claims: which were tested and right, (B, M) each."""
        kinds = _kinds(claims).flatten()
        self.right.scatter_add_(0, kinds, right.double().flatten())
        self.claimed.scatter_add_(0, kinds, (_most(claims) * tested).flatten())

    def proven(self, claims: torch.Tensor) -> torch.Tensor:
        """(B, M) probabilities, given their parents, of tokens of which drafters claim this."""
        kinds, most = _kinds(claims), _most(claims)
        proven = (self.right[kinds] + TRUST) / (self.claimed[kinds] + TRUST)
        return (most * proven).clamp(max=1)


class PromptRecords:
    """counts: (2, B, 3), tokens that were right in each of B prompts, and that were expected to be,
    by what the first drafter named in their place: nothing, other tokens, or the token itself."""

    def __init__(self, batch: int, device: torch.device):
        self.counts = torch.zeros(2, batch, 3, dtype=torch.float64, device=device)

    def count(
        self,
        claims: torch.Tensor,
        tested: torch.Tensor,
        right: torch.Tensor,
        expected: torch.Tensor,
    ) -> None:
        """As `Record.count`; expected: (B, M), how probable the nodes were for all prompts."""
        found = torch.stack([right.double(), expected * tested])
        self.counts.scatter_add_(2, _named(claims).expand_as(found), found)

    def correction(self, claims: torch.Tensor) -> torch.Tensor:
        """(B, M) what to multiply the probabilities by that all prompts have shown."""
        named = _named(claims)
        prior = torch.where(named == 2, PROMPT_TRUST, PROMPT_TRUST * DOUBT)
        right, expected = self.counts.gather(2, named.expand(2, -1, -1))
        return (right + prior) / (expected + PROMPT_TRUST)

    def keep(self, index: torch.Tensor) -> None:
        self.counts = self.counts[:, index]

    def join(self, other: "PromptRecords") -> None:
        self.counts = torch.cat([self.counts, other.counts], 1)


def _kinds(claims: torch.Tensor) -> torch.Tensor:
    """(B, M, drafters) claims -> (B, M) places in the tables of a record."""
    kinds = (claims * BINS - ROUNDING).ceil().clamp(min=1).masked_fill(claims == 0, 0)
    kinds = kinds.masked_fill(claims < 0, BINS + 1).long()
    places = (BINS + 2) ** torch.arange(claims.shape[-1], device=claims.device)
    return (kinds * places).sum(-1)


def _most(claims: torch.Tensor) -> torch.Tensor:
    """(B, M) what is believed at first: the first drafter's claim, else the others' highest."""
    first = claims[..., 0]
    return torch.where(first > 0, first, claims.amax(-1).clamp(min=0))


def _named(claims: torch.Tensor) -> torch.Tensor:
    """(B, M) by the first drafter: 2 if it has named the token, 1 if others, 0 if none."""
    return claims[..., 0].sign().long() + 1
