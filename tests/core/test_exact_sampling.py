"""Exactness of sampling, by enumeration: the next two tokens have the target's distribution.

Chance is replaced by a `Randomness` that goes through every outcome with its probability, while
trees are drawn as well as while they are verified. The target is a random table p(next | prefix).
"""

from collections.abc import Callable

import pytest
import torch
from slipstream.core.tree import DraftTree, Proposal, most_confident, prune, union

from slipstream.core import verification
from slipstream.core.growth import grow_best_first, independent_children
from slipstream.core.verification import verify_sampling

VOCABULARY = 4
ROOT = 0
TOLERANCE = 1e-9


class EnumeratedRandomness:
    """Replays a list of choices, then takes the first possible one and notes the others."""

    def __init__(self, choices: list[int]):
        self.choices, self.taken = choices, []
        self.probability = 1.0
        self.others: list[list[int]] = []

    def _choose(self, weights: list[float]) -> int:
        assert all(weight >= -1e-12 for weight in weights)
        assert sum(weights) == pytest.approx(1.0, abs=1e-12)
        possible = [option for option, weight in enumerate(weights) if weight > 0]
        if len(self.taken) < len(self.choices):
            option = self.choices[len(self.taken)]
        else:
            option = possible[0]
            self.others += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(option)
        self.probability *= weights[option]
        return option

    def accept(self, probability: float) -> bool:
        return self._choose([1.0 - probability, probability]) == 1

    def draw(self, probabilities: torch.Tensor) -> int:
        return self._choose(probabilities.tolist())


def enumerated(outcome_of: Callable[[EnumeratedRandomness], tuple]) -> dict[tuple, float]:
    """Outcome -> probability, over everything that chance can do."""
    distribution: dict[tuple, float] = {}
    waiting: list[list[int]] = [[]]
    while waiting:
        randomness = EnumeratedRandomness(waiting.pop())
        outcome = outcome_of(randomness)
        distribution[outcome] = distribution.get(outcome, 0.0) + randomness.probability
        waiting += randomness.others
    assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-12)
    return distribution


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

    def after_each(self, tree: DraftTree, prefix: tuple[int, ...]) -> torch.Tensor:
        """(N, V): the distribution after every node of a tree whose root ends `prefix`."""
        paths = [tuple(tree.tokens[step] for step in tree.path(n)[1:]) for n in range(len(tree))]
        return torch.stack([self.after(prefix + path) for path in paths])


TARGET = Table(seed=1)
DRAFT = Table(seed=4)
Propose = Callable[[tuple[int, ...], EnumeratedRandomness], DraftTree]


def next_two(propose: Propose, target: Table = TARGET) -> dict[tuple[int, int], float]:
    """Distribution of the next two tokens; a step that emits one is followed by a second step."""

    def step(prefix: tuple[int, ...], count: int) -> dict[tuple, float]:
        def outcome(randomness: EnumeratedRandomness) -> tuple:
            tree = propose(prefix, randomness)
            assert tree.tokens[0] == prefix[-1]
            verdict = verify_sampling(tree, target.after_each(tree, prefix), randomness)
            emitted = [tree.tokens[node] for node in verdict.path[1:]] + [verdict.next_token]
            return tuple(emitted[:count])

        return enumerated(outcome)

    pairs: dict[tuple[int, int], float] = {}
    for emitted, probability in step((ROOT,), 2).items():
        if len(emitted) == 2:
            pairs[emitted] = pairs.get(emitted, 0.0) + probability
            continue
        for then, share in step((ROOT, *emitted), 1).items():
            pair = emitted + then
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
    return lambda prefix, _: DraftTree([prefix[-1], *tokens], [-1, *parents])


def levels_of(prefix: tuple[int, ...], depth: int, top_k: int) -> tuple[list, list]:
    """Top-k tokens of the draft table for independent levels, as streams give them."""
    best = [DRAFT.after((*prefix, level)).topk(top_k) for level in range(depth)]
    return [level.indices.tolist() for level in best], independent_children(
        [p.values.tolist() for p in best]
    )


def cut_to_budget(prefix: tuple[int, ...], _) -> DraftTree:
    """Best-first growth with a node budget."""
    tree = grow_best_first(prefix[-1], *levels_of(prefix, 3, 3), budget=7)
    assert len(tree) == 7
    return tree


def merged_and_cut(prefix: tuple[int, ...], _) -> DraftTree:
    """Two drafts in one tree, its most confident nodes kept."""
    chain = DraftTree([prefix[-1], 1, 2], [-1, 0, 1], [1.0, 0.9, 0.2])
    wide = DraftTree([prefix[-1], 1, 3, 0], [-1, 0, 0, 1], [1.0, 0.5, 0.4, 0.3])
    merged, _ = union([chain, wide])
    assert len(merged) == 5
    return merged.keep(most_confident(merged, 3))


def pruned(prefix: tuple[int, ...], _) -> DraftTree:
    """Threshold and cap of the early exit, whose transitions depend on the tokens."""
    tree = grow_best_first(prefix[-1], *levels_of(prefix, 2, 3), budget=12)
    paths = [prefix + tuple(tree.tokens[n] for n in tree.path(node)[1:-1]) for node in range(12)]
    transitions = [
        float(DRAFT.after(path)[token]) for path, token in zip(paths, tree.tokens, strict=True)
    ]
    kept = prune(tree, transitions, threshold=0.1, cap=5)
    assert 1 < len(kept) <= 5
    return tree.keep(kept)


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


@pytest.mark.parametrize("name", sorted(DETERMINISTIC))
@pytest.mark.parametrize("num_allowed", [VOCABULARY, 2])
def test_deterministic_trees(name, num_allowed):
    assert largest_error(DETERMINISTIC[name], Table(1, num_allowed)) < TOLERANCE


class Sampled:
    """Draws trees: `widths` children per node and level, of which `levels` says how they come.

    'drawn' siblings are drawn with replacement, 'distinct' ones without, 'top' ones are the most
    probable tokens. Only the first sibling of each level has children of its own, or with
    `everywhere` each of them.
    """

    def __init__(
        self,
        levels: list[tuple[str, int]],
        draft: Table = DRAFT,
        everywhere: bool = False,
        stop_below: float = 0.0,
    ):
        self.levels, self.draft, self.everywhere = levels, draft, everywhere
        self.stop_below = stop_below
        self.repeated_siblings = 0

    def __call__(self, prefix: tuple[int, ...], randomness: EnumeratedRandomness) -> DraftTree:
        tree = DraftTree([prefix[-1]], [-1])
        frontier = [(0, prefix)]
        for kind, width in self.levels:
            grown = []
            for node, path in frontier:
                chosen = self._children(tree, node, path, kind, width, randomness)
                self.repeated_siblings += len(chosen) - len(set(chosen))
                for token in chosen:
                    tree.tokens.append(token)
                    tree.parents.append(node)
                    tree.confidences.append(1.0)
                    if float(self.draft.after(path)[token]) >= self.stop_below:
                        grown.append((len(tree) - 1, (*path, token)))
            frontier = grown if self.everywhere else grown[:1]
        return tree

    def _children(self, tree, node, path, kind, width, randomness) -> list[int]:
        distribution = self.draft.after(path)
        if kind == "top":
            return distribution.topk(width).indices.tolist()
        tree.proposals[node] = Proposal(distribution, replacement=kind == "drawn")
        chosen = []
        for _ in range(width):
            chosen.append(randomness.draw(distribution))
            if kind == "distinct":
                distribution = distribution.clone()
                distribution[chosen[-1]] = 0
                distribution = distribution / distribution.sum().clamp(min=1e-300)
        return chosen


SAMPLED = {
    "chain": Sampled([("drawn", 1)] * 3),
    "chain_from_the_target_itself": Sampled([("drawn", 1)] * 2, draft=TARGET),
    "chain_from_two_tokens": Sampled([("drawn", 1)] * 2, draft=Table(3, num_allowed=2)),
    "confidence_stop_keeps_the_token": Sampled([("drawn", 1)] * 3, stop_below=0.3),
    "siblings": Sampled([("drawn", 3)]),
    "siblings_of_siblings": Sampled([("drawn", 2), ("drawn", 2)]),
    "siblings_everywhere": Sampled([("drawn", 2), ("drawn", 1)], everywhere=True),
    "distinct_siblings": Sampled([("distinct", 3)]),
    "all_distinct_siblings": Sampled([("distinct", VOCABULARY)]),
    "distinct_siblings_everywhere": Sampled([("distinct", 2), ("distinct", 1)], everywhere=True),
    "top_then_drawn": Sampled([("top", 2), ("drawn", 2)]),
    "top_then_distinct": Sampled([("top", 3), ("distinct", 2)]),
    "drawn_then_top": Sampled([("drawn", 2), ("top", 2), ("drawn", 1)]),
    "distinct_then_top_everywhere": Sampled([("distinct", 2), ("top", 2)], everywhere=True),
}


@pytest.mark.parametrize("name", sorted(SAMPLED))
def test_sampled_trees(name):
    assert largest_error(SAMPLED[name]) < TOLERANCE


@pytest.mark.parametrize("name", ["chain", "siblings", "distinct_siblings", "drawn_then_top"])
def test_sampled_trees_for_a_truncated_target(name):
    assert largest_error(SAMPLED[name], Table(1, num_allowed=2)) < TOLERANCE


def test_repeated_siblings_do_arise_and_count():
    propose = Sampled([("drawn", 3)])
    assert largest_error(propose) < TOLERANCE
    assert propose.repeated_siblings > 10


def test_pruning_deterministic_children_below_sampled_ones():
    grown = Sampled([("drawn", 2), ("top", 3)], everywhere=True)

    def propose(prefix: tuple[int, ...], randomness: EnumeratedRandomness) -> DraftTree:
        tree = grown(prefix, randomness)
        confidences = [1.0] * 3 + [1.0 / (1 + token) for token in tree.tokens[3:]]
        tree.confidences = confidences
        kept = tree.keep(most_confident(tree, 5))
        assert len(tree) == 9 and len(kept) == 5 and kept.proposals
        return kept

    assert largest_error(propose) < TOLERANCE


def unchanged(remaining, token, drawn_from):
    return remaining


def not_clamped(remaining, token, drawn_from):
    if drawn_from is None:
        return verification._without(remaining, token)
    left = (remaining - drawn_from).abs()
    return left / left.sum()


def as_if_deterministic(remaining, token, drawn_from):
    return verification._without(remaining, token)


def as_if_sampled(remaining, token, drawn_from):
    uniform = torch.full_like(remaining, 1 / VOCABULARY)
    left = (remaining - (uniform if drawn_from is None else drawn_from)).clamp(min=0)
    return left / left.sum()


@pytest.mark.parametrize(
    ("residual", "propose"),
    [
        (unchanged, DETERMINISTIC["chain"]),
        (unchanged, SAMPLED["chain"]),
        (unchanged, SAMPLED["distinct_siblings"]),
        (not_clamped, SAMPLED["chain"]),
        (not_clamped, SAMPLED["siblings"]),
        (as_if_deterministic, SAMPLED["chain"]),
        (as_if_sampled, DETERMINISTIC["wide"]),
    ],
)
def test_a_wrong_residual_is_noticed(monkeypatch, residual, propose):
    monkeypatch.setattr(verification, "residual", residual)
    assert largest_error(propose) > 1e-3


def test_siblings_with_the_wrong_proposal_are_noticed():
    def mislabelled(prefix: tuple[int, ...], randomness: EnumeratedRandomness) -> DraftTree:
        tree = Sampled([("distinct", 2)])(prefix, randomness)
        tree.proposals = {
            node: Proposal(value.probabilities) for node, value in tree.proposals.items()
        }
        return tree

    assert largest_error(mislabelled) > 1e-3


class Even:
    """p = q = (1/2, 1/2), the example of the notes."""

    def after_each(self, tree: DraftTree, prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.full((len(tree), 2), 0.5, dtype=torch.float64)


def test_pruning_a_sampled_child_by_its_token_is_biased_and_refused():
    even = torch.tensor([0.5, 0.5], dtype=torch.float64)

    def drawn(randomness: EnumeratedRandomness) -> DraftTree:
        return DraftTree([0, randomness.draw(even)], [-1, 0], proposals={0: Proposal(even)})

    def first_token(tree: DraftTree, randomness: EnumeratedRandomness) -> tuple[int]:
        verdict = verify_sampling(tree, Even().after_each(tree, (0,)), randomness)
        return (([tree.tokens[node] for node in verdict.path[1:]] + [verdict.next_token])[0],)

    def honest(randomness: EnumeratedRandomness) -> tuple[int]:
        return first_token(drawn(randomness), randomness)

    def biased(randomness: EnumeratedRandomness) -> tuple[int]:
        tree = drawn(randomness)
        return first_token(DraftTree([0], [-1]) if tree.tokens[1] == 1 else tree, randomness)

    assert enumerated(honest) == {(0,): 0.5, (1,): 0.5}
    assert enumerated(biased) == {(0,): 0.75, (1,): 0.25}
    with pytest.raises(ValueError, match="sampled"):
        drawn(EnumeratedRandomness([])).keep([0])


@pytest.mark.parametrize("replacement", [True, False])
def test_a_rejection_that_only_rounding_allows_still_leaves_a_distribution(replacement):
    """In float32 p and q may be equal but for rounding, with p below q everywhere."""

    class Rejecting(EnumeratedRandomness):
        def accept(self, probability: float) -> bool:
            assert probability > 0.999
            return False

    drafted = torch.tensor([0.25, 0.75])
    tree = DraftTree([0, 1], [-1, 0], proposals={0: Proposal(drafted, replacement)})
    target = (drafted * (1 - 6e-8)).expand(2, 2)
    assert bool((target < drafted).all())
    assert verify_sampling(tree, target, Rejecting([])).next_token in (0, 1)
