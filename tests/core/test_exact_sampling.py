"""Exactness of sampling, by enumeration: the next two tokens have the target's distribution.

All that the uniform numbers can do is gone through, cell by cell (tests/enumeration.py), while
trees are drawn as well as while they are verified. The target is a random table p(next | prefix).
"""

from collections.abc import Callable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from tests.enumeration import EnumeratedChance, enumerated
from tests.exhaustive import sparing
from tests.reference import DraftTree, grow_best_first, independent_children

from slipstream.core import verification
from slipstream.core.drafts import Draft
from slipstream.core.sampling import Sampling
from slipstream.core.trees import Drawn, Trees, merge, most_probable, survivors
from slipstream.drafters.drawn_streams import drawn_trees

VOCABULARY = 4
ROOT = 0
TOLERANCE = 1e-9
pytestmark = pytest.mark.usefixtures("chance")


class Table:
    """A model on a tiny vocabulary: p(next | prefix), random for every prefix and exact.

    num_allowed: how many tokens have probability above zero, as after top-k.
    """

    def __init__(self, seed: int, num_allowed: int = VOCABULARY):
        self.seed, self.num_allowed = seed, num_allowed
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}

    def after(self, prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix not in self._rows:
            self._rows[prefix] = self._row(prefix)
        return self._rows[prefix]

    def _row(self, prefix: tuple[int, ...]) -> torch.Tensor:
        number = sum((token + 1) * 7**place for place, token in enumerate(prefix))
        generator = torch.Generator().manual_seed(1000 * number + self.seed)
        weights = torch.rand(VOCABULARY, generator=generator, dtype=torch.float64) ** 2 + 0.01
        weights[torch.randperm(VOCABULARY, generator=generator)[self.num_allowed :]] = 0
        return weights / weights.sum()

    def after_each(self, trees: Trees, prefix: tuple[int, ...]) -> torch.Tensor:
        """(1, N, V): the distribution after every node of a tree whose root ends `prefix`."""
        rows = []
        for node in range(trees.width):
            above = trees.ancestors[0, node].nonzero().flatten().tolist()
            rows.append(self.after(prefix + tuple(trees.tokens[0, n].item() for n in above[1:])))
        return torch.stack(rows)[None]


TARGET = Table(seed=1)
DRAFT = Table(seed=4)
Propose = Callable[[tuple[int, ...], EnumeratedChance], Trees]


def points_of(trees: Trees, chance: EnumeratedChance) -> torch.Tensor:
    """(1, N): the number that decides what follows each node."""
    return chance.decide[trees.depths]


def emitted(trees: Trees, probabilities: torch.Tensor, chance: EnumeratedChance) -> list[int]:
    """The tokens that one step decides."""
    if trees.drawn is None:
        points = points_of(trees, chance)
        choices = verification.draw(probabilities, points)
        last = verification.follow(trees, choices)
        following = choices[0, last]
    else:
        siblings = max(int((trees.parents == node).sum()) for node in range(trees.width))
        keep = chance.keep[None, : trees.depth, :siblings]
        decide = chance.decide[None, : trees.depth + 1]
        last, following = verification.keep_or_reject(trees, probabilities, keep, decide)
    nodes, counts = verification.paths_to(trees, last)
    path = nodes[0, 1 : counts[0]]
    return [*trees.tokens[0, path].tolist(), int(following)]


def next_two(propose: Propose, target: Table = TARGET) -> dict[tuple[int, int], float]:
    """Distribution of the next two tokens; a step that emits one is followed by a second step."""

    def step(prefix: tuple[int, ...], count: int) -> dict[tuple, float]:
        def outcome(chance: EnumeratedChance) -> tuple:
            trees = propose(prefix, chance)
            assert trees.tokens[0, 0] == prefix[-1]
            return tuple(emitted(trees, target.after_each(trees, prefix), chance)[:count])

        return enumerated(outcome)

    pairs: dict[tuple[int, int], float] = {}
    for tokens, probability in step((ROOT,), 2).items():
        if len(tokens) == 2:
            pairs[tokens] = pairs.get(tokens, 0.0) + probability
            continue
        for then, share in step((ROOT, *tokens), 1).items():
            pair = tokens + then
            pairs[pair] = pairs.get(pair, 0.0) + probability * share
    return pairs


def largest_error(propose: Propose, target: Table = TARGET) -> float:
    """Largest difference of any pair's probability from the target's."""
    found = next_two(propose, target)
    return max(
        abs(
            found.get((first, second), 0.0)
            - float(target.after((ROOT,))[first] * target.after((ROOT, first))[second])
        )
        for first in range(VOCABULARY)
        for second in range(VOCABULARY)
    )


def fixed(tokens: list[int], parents: list[int]) -> Propose:
    """The same deterministic tree in every step."""
    return lambda prefix, _: Trees.of([Draft([prefix[-1], *tokens], [-1, *parents])])


def grown(prefix: tuple[int, ...], depth: int, top_k: int, budget: int) -> DraftTree:
    """The best tree of top-k tokens of the draft table for independent levels, as of streams."""
    best = [DRAFT.after((*prefix, level)).topk(top_k) for level in range(depth)]
    tokens = [level.indices.tolist() for level in best]
    children = independent_children([level.values.tolist() for level in best])
    tree = grow_best_first(prefix[-1], tokens, children, budget)
    return DraftTree(tree.tokens, tree.parents, tree.confidences)


def cut_to_budget(prefix: tuple[int, ...], _) -> Trees:
    """Best-first growth with a node budget."""
    return Trees.of([grown(prefix, 3, 3, 7)])


def merged_and_cut(prefix: tuple[int, ...], _) -> Trees:
    """Two drafts in one tree, its most confident nodes kept."""
    chain = Draft([prefix[-1], 1, 2], [-1, 0, 1], [1.0, 0.9, 0.2])
    wide = Draft([prefix[-1], 1, 3, 0], [-1, 0, 0, 1], [1.0, 0.5, 0.4, 0.3])
    merged, _ = merge([Trees.of([chain]), Trees.of([wide])])
    assert merged.real.sum() == 5
    return merged.select(most_probable(merged, 3))


def pruned(prefix: tuple[int, ...], _) -> Trees:
    """Threshold and cap of the early exit, whose transitions depend on the tokens."""
    tree = grown(prefix, 2, 3, 12)
    paths = [prefix + tuple(tree.tokens[n] for n in tree.path(node)[1:-1]) for node in range(12)]
    transitions = [
        float(DRAFT.after(path)[token]) for path, token in zip(paths, tree.tokens, strict=True)
    ]
    trees = Trees.of([tree])
    kept = survivors(trees, torch.tensor([transitions]), threshold=0.1, cap=5)
    assert 1 < (kept >= 0).sum() <= 5
    return trees.select(kept)


DETERMINISTIC = {
    "root_alone": fixed([], []),
    "chain": fixed([1, 2, 3], [0, 1, 2]),
    "wide": fixed([2, 0, 3], [0, 0, 0]),
    "all_tokens": fixed([3, 1, 0, 2], [0, 0, 0, 0]),
    "deep": fixed([1, 0, 2, 3, 0, 1, 2, 1], [0, 0, 1, 1, 2, 3, 3, 4]),
    "repeated_siblings": fixed([1, 1, 2, 1, 3, 0, 2], [0, 0, 0, 0, 1, 2, 2]),
    "cut_to_budget": cut_to_budget,
    "merged_and_cut": merged_and_cut,
    "pruned": pruned,
}


@pytest.mark.parametrize(
    ("name", "num_allowed"),
    sparing(
        product(sorted(DETERMINISTIC), (VOCABULARY, 2)),
        lambda name, num_allowed: num_allowed == VOCABULARY or name in ("all_tokens", "deep"),
    ),
)
def test_deterministic_trees(name, num_allowed):
    assert largest_error(DETERMINISTIC[name], Table(1, num_allowed)) < TOLERANCE


@pytest.mark.parametrize(
    ("name",), sparing(zip(["chain", "deep", "cut_to_budget"]), lambda name: name == "chain")
)
def test_one_number_for_two_depths_is_noticed(monkeypatch, name):
    monkeypatch.setitem(
        globals(), "points_of", lambda trees, chance: chance.decide[0 * trees.depths]
    )
    assert largest_error(DETERMINISTIC[name]) > 1e-3


def test_a_tree_that_knows_the_number_is_noticed():
    """Trees must not depend on the numbers that decide."""

    def peeking(prefix: tuple[int, ...], chance: EnumeratedChance) -> Trees:
        first = int(verification.draw(TARGET.after(prefix), chance.decide[1]))
        return Trees.of([Draft([prefix[-1], first, 1], [-1, 0, 1])])

    assert largest_error(peeking) > 1e-3


class Sampled:
    """Draws trees: `widths` children per node and level; of each level the first sibling alone has
    children of its own, or with `everywhere` each of them.

    distinct: whether siblings are drawn without replacement.
    """

    def __init__(
        self,
        widths: Sequence[int],
        draft: Table = DRAFT,
        distinct: bool = False,
        everywhere: bool = False,
        stop_below: float = 0.0,
        labelled_distinct: bool | None = None,
    ):
        self.widths, self.draft, self.distinct = widths, draft, distinct
        self.everywhere, self.stop_below = everywhere, stop_below
        self.labelled = distinct if labelled_distinct is None else labelled_distinct
        self.repeated_siblings = 0

    def __call__(self, prefix: tuple[int, ...], chance: EnumeratedChance) -> Trees:
        tokens, parents, rows = [prefix[-1]], [-1], [self.draft.after(prefix)]
        frontier = [(0, prefix)]
        for width in self.widths:
            found = []
            for node, path in frontier:
                chosen = self._children(path, width, chance)
                self.repeated_siblings += len(chosen) - len(set(chosen))
                for token in chosen:
                    tokens.append(token)
                    parents.append(node)
                    rows.append(self.draft.after((*path, token)))
                    if float(self.draft.after(path)[token]) >= self.stop_below:
                        found.append((len(tokens) - 1, (*path, token)))
            frontier = found if self.everywhere else found[:1]
        trees = Trees.of([Draft(tokens, parents)])
        trees.drawn = Drawn(torch.stack(rows)[None], replacement=not self.labelled)
        return trees

    def _children(self, path: tuple[int, ...], width: int, chance: EnumeratedChance) -> list[int]:
        distribution, chosen = self.draft.after(path), []
        for _ in range(width):
            chosen.append(chance.draw(distribution))
            if self.distinct:
                distribution = distribution.clone()
                distribution[chosen[-1]] = 0
                distribution = distribution / distribution.sum().clamp(min=1e-300)
        return chosen


class Request(NamedTuple):
    """As much of one as streams look at."""

    chance: EnumeratedChance
    sampling: Sampling


def streams(budget: int, levels: int, top_k: int, sampling: Sampling, room: int = 9) -> Propose:
    """Children drawn from what streams say of each level, whatever stands before it."""

    own = SimpleNamespace(pairs=None, settings=SimpleNamespace(top_k=top_k))

    def propose(prefix: tuple[int, ...], chance: EnumeratedChance) -> Trees:
        logits = torch.stack([DRAFT.after((*prefix, level)) for level in range(levels)]).log()
        roots, room_left = torch.tensor([prefix[-1]]), torch.tensor([room])
        given = budget, roots, room_left, None
        return drawn_trees(own, [Request(chance, sampling)], logits[None], *given)

    return propose


SAMPLED = {
    "streams_chain": streams(3, 2, 1, Sampling(1.0)),
    "streams_siblings": streams(4, 1, 3, Sampling(0.7)),
    "streams_all_tokens": streams(5, 1, 4, Sampling(1.0)),
    "streams_two_levels": streams(4, 2, 2, Sampling(1.0, top_k=3)),
    "streams_no_room": streams(4, 2, 2, Sampling(1.0), room=2),
    "streams_one_token": streams(4, 2, 2, Sampling(1.0, top_k=1)),
    "pair": Sampled([1, 1]),
    "chain": Sampled([1, 1, 1]),
    "chain_from_the_target_itself": Sampled([1, 1], draft=TARGET),
    "chain_from_two_tokens": Sampled([1, 1], draft=Table(3, num_allowed=2)),
    "confidence_stop_keeps_the_token": Sampled([1, 1, 1], stop_below=0.3),
    "siblings": Sampled([3]),
    "siblings_of_siblings": Sampled([2, 2]),
    "siblings_everywhere": Sampled([2, 1], everywhere=True),
    "distinct_siblings": Sampled([3], distinct=True),
    "distinct_siblings_everywhere": Sampled([2, 1], distinct=True, everywhere=True),
}


LARGE = {"chain", "siblings_everywhere", "distinct_siblings_everywhere", "siblings_of_siblings"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in LARGE else [])
        for name in sorted(SAMPLED)
    ],
)
def test_sampled_trees(name):
    assert largest_error(SAMPLED[name]) < TOLERANCE
    if name == "siblings":
        assert SAMPLED[name].repeated_siblings > 10, "they arise, and count"


@pytest.mark.parametrize(
    ("name",),
    sparing(
        zip(["pair", "chain", "siblings", "distinct_siblings"]),
        lambda name: name in ("pair", "distinct_siblings"),
    ),
)
def test_sampled_trees_for_a_truncated_target(name):
    assert largest_error(SAMPLED[name], Table(1, num_allowed=2)) < TOLERANCE


def unchanged(remaining, drawn_from):
    return remaining


def not_clamped(remaining, drawn_from):
    left = (remaining - drawn_from).abs()
    return left / left.sum(-1, keepdim=True)


def of_another_draft(remaining, drawn_from):
    return verification._normalised((remaining - 1 / VOCABULARY).clamp(min=0), remaining)


WRONG = [unchanged, not_clamped, of_another_draft]
NOTICED_BY = ["pair", "siblings", "distinct_siblings", "streams_two_levels"]


@pytest.mark.parametrize(
    "residual, name",
    sparing(
        product(WRONG, NOTICED_BY),
        lambda residual, name: (
            name == "pair" or (residual is WRONG[2] and name == "distinct_siblings")
        ),
    ),
)
def test_a_wrong_residual_is_noticed(monkeypatch, residual, name):
    monkeypatch.setattr(verification, "residual", residual)
    assert largest_error(SAMPLED[name]) > 1e-3


def test_siblings_with_the_wrong_proposal_are_noticed():
    assert largest_error(Sampled([2], distinct=True, labelled_distinct=False)) > 1e-3


def test_pruning_a_drawn_child_by_its_token_is_biased_and_refused():
    """p = q = (1/2, 1/2), the example of the notes."""
    even = torch.full((1, 2, 2), 0.5, dtype=torch.float64)

    def drawn(chance: EnumeratedChance) -> Trees:
        trees = Trees.of([Draft([0, chance.draw(even[0, 0])], [-1, 0])])
        trees.drawn = Drawn(even)
        return trees

    def first_token(trees: Trees, chance: EnumeratedChance) -> tuple[int]:
        return (emitted(trees, even[:, : trees.width], chance)[0],)

    def honest(chance: EnumeratedChance) -> tuple[int]:
        return first_token(drawn(chance), chance)

    def biased(chance: EnumeratedChance) -> tuple[int]:
        trees = drawn(chance)
        roots = Trees.roots(torch.zeros(1).long())
        return first_token(roots if trees.tokens[0, 1] else trees, chance)

    assert enumerated(honest) == pytest.approx({(0,): 0.5, (1,): 0.5})
    assert enumerated(biased) == pytest.approx({(0,): 0.75, (1,): 0.25})
    with pytest.raises(ValueError, match="drawn"):
        drawn(EnumeratedChance({}, {})).select(torch.tensor([[0]]))


@pytest.mark.parametrize("replacement", [True, False])
def test_a_rejection_that_only_rounding_allows_leaves_a_distribution(replacement, monkeypatch):
    """In float32 p and q may be equal but for rounding, with p below q everywhere."""

    def rejecting(points, ratios, trying):
        assert ratios[trying].min() > 0.999
        return torch.zeros_like(trying)

    monkeypatch.setattr(verification, "keeps", rejecting)
    drafted = torch.tensor([0.25, 0.75]).expand(1, 2, 2)
    trees = Trees.of([Draft([0, 1], [-1, 0])])
    trees.drawn = Drawn(drafted, replacement)
    target = drafted * (1 - 6e-8)
    assert bool((target < drafted).all())
    numbers = torch.tensor([[[0.5]]], dtype=torch.float64), torch.tensor([[0.1, 0.1]]).double()
    _, following = verification.keep_or_reject(trees, target, *numbers)
    assert int(following) in (0, 1)
