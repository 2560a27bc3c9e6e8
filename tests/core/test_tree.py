"""Trees: invalid ones, pruning of sampled children, merging, best-first growth, pruning by cap."""

import math
from itertools import pairwise, product

import pytest
import torch
from slipstream.core.tree import DraftTree, Proposal, most_confident, prune, union
from tests.tiny import random_tree

from slipstream.core.growth import grow_best_first, independent_children


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_confidences(tree: DraftTree, generator: torch.Generator) -> list[float]:
    """Path probabilities: the root's is 1, a child's is a part of its parent's."""
    confidences = [1.0]
    for node in range(1, len(tree)):
        share = float(torch.rand((), generator=generator, dtype=torch.float64))
        confidences.append(confidences[tree.parents[node]] * share)
    return confidences


def token_paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Confidence of every node, by the tokens along its path; no two siblings may be equal."""
    paths = {
        tuple(tree.tokens[step] for step in tree.path(node)): tree.confidences[node]
        for node in range(len(tree))
    }
    assert len(paths) == len(tree)
    return paths


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([], []),
        ([1], []),
        ([1, 2], [-1]),
        ([1], [0]),
        ([1, 2], [-1, 1]),
        ([1, 2], [-1, -1]),
        ([1, 2, 3], [-1, 2, 0]),
        ([1, 2], [0, -1]),
    ],
)
def test_invalid_trees_are_refused(tokens, parents):
    with pytest.raises(ValueError):
        DraftTree(tokens, parents)


@pytest.mark.parametrize("seed", range(4))
def test_the_views_of_a_tree_agree_with_its_parents(seed):
    tree = random_tree(12, seeded(seed))
    depths = tree.depths()
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[0] == 0 and path[-1] == node and len(path) == depths[node] + 1
        assert all(tree.parents[low] == high for high, low in pairwise(path))
        assert all(tree.parents[child] == node for child in tree.children(node))
        assert tree.children(node) == sorted(tree.children(node))
    assert sum(len(tree.children(node)) for node in range(len(tree))) == len(tree) - 1


def test_keep_renumbers_tokens_parents_confidences_and_proposals():
    first, second = torch.tensor([0.5, 0.5]), torch.tensor([0.1, 0.9])
    tree = DraftTree(
        [7, 1, 2, 3, 4, 5],
        [-1, 0, 0, 1, 2, 4],
        [1.0, 0.6, 0.4, 0.3, 0.2, 0.1],
        {1: Proposal(first), 4: Proposal(second, replacement=False)},
    )
    kept = tree.keep([0, 2, 4, 5])
    assert kept.tokens == [7, 2, 4, 5] and kept.parents == [-1, 0, 1, 2]
    assert kept.confidences == [1.0, 0.4, 0.2, 0.1]
    assert list(kept.proposals) == [2] and kept.proposals[2] is tree.proposals[4]


def test_keep_refuses_to_drop_a_sampled_child():
    sampled = Proposal(torch.tensor([0.5, 0.5]))
    tree = DraftTree([0, 1, 0, 1], [-1, 0, 0, 1], proposals={0: sampled})
    for nodes in ([0], [0, 1], [0, 2], [0, 1, 3]):
        with pytest.raises(ValueError, match="sampled"):
            tree.keep(nodes)
    assert len(tree.keep([0, 1, 2])) == 3


def test_sampled_children_may_leave_together_with_a_deterministic_parent():
    sampled = Proposal(torch.tensor([0.5, 0.5]))
    tree = DraftTree([0, 1, 0, 1], [-1, 0, 0, 1], proposals={1: sampled})
    kept = tree.keep([0, 2])
    assert kept.tokens == [0, 0] and kept.proposals == {}


@pytest.mark.parametrize("seed", range(6))
def test_a_union_has_all_paths_with_the_higher_confidence(seed):
    generator = seeded(seed)
    trees = []
    for _ in range(2):
        shape = random_tree(9, generator)
        tokens, taken = [7], set()
        for node in range(1, len(shape)):
            token = int(torch.randint(0, 4, (), generator=generator))
            while (shape.parents[node], token) in taken:
                token += 1
            taken.add((shape.parents[node], token))
            tokens.append(token)
        trees.append(DraftTree(tokens, shape.parents, random_confidences(shape, generator)))
    ours, theirs = (token_paths(tree) for tree in trees)
    paths = {path: max(ours.get(path, 0.0), theirs.get(path, 0.0)) for path in ours.keys() | theirs}
    assert len(paths) < len(ours) + len(theirs) - 1
    both, places = union(trees)
    assert token_paths(both) == paths
    for tree, own in zip(trees, places, strict=True):
        for node in range(len(tree)):
            there = [both.tokens[each] for each in both.path(own[node])]
            assert there == [tree.tokens[each] for each in tree.path(node)]
    for budget in (1, 4, 8):
        cut = token_paths(both.keep(most_confident(both, budget)))
        best = sorted(paths.values(), reverse=True)[:budget]
        assert sorted(cut.values(), reverse=True) == best
        assert cut.items() <= paths.items()


@pytest.mark.parametrize("swapped", [False, True])
def test_a_union_joins_equal_siblings_wherever_they_stand(swapped):
    repeated = DraftTree([7, 1, 1, 2, 3], [-1, 0, 0, 1, 2], [1.0, 0.2, 0.5, 0.1, 0.4])
    other = DraftTree([7, 1], [-1, 0], [1.0, 0.3])
    merged, _ = union([other, repeated] if swapped else [repeated, other])
    assert token_paths(merged) == {(7,): 1.0, (7, 1): 0.5, (7, 1, 2): 0.1, (7, 1, 3): 0.4}


def test_a_union_refuses_other_roots_and_sampled_trees():
    chain = DraftTree.chain([7, 1])
    with pytest.raises(ValueError, match="root"):
        union([chain, DraftTree.chain([8, 1])])
    sampled = DraftTree([7, 1], [-1, 0], proposals={0: Proposal(torch.tensor([0.5, 0.5]))})
    for one, other in ((chain, sampled), (sampled, chain)):
        with pytest.raises(ValueError, match="sampled"):
            union([one, other])


@pytest.mark.parametrize("seed", range(6))
def test_most_confident_takes_the_best_closed_set(seed):
    generator = seeded(seed)
    shape = random_tree(10, generator)
    tree = DraftTree(shape.tokens, shape.parents, random_confidences(shape, generator))
    ranked = sorted(range(10), key=lambda node: -tree.confidences[node])
    for budget in (1, 3, 7, 10, 20):
        assert most_confident(tree, budget) == sorted(ranked[:budget])


def test_a_child_counts_no_more_than_its_parent():
    tree = DraftTree([7, 1, 2, 3], [-1, 0, 0, 1], [1.0, 0.2, 0.5, 0.9])
    assert most_confident(tree, 2) == [0, 2]
    assert most_confident(tree, 3) == [0, 1, 2]


def cartesian(level_probabilities: list[list[float]]) -> dict[tuple[int, ...], float]:
    """Every path of ranks of the full tree with its product of probabilities."""
    paths = {(): 1.0}
    for depth in range(1, len(level_probabilities) + 1):
        levels = [range(len(level)) for level in level_probabilities[:depth]]
        for ranks in product(*levels):
            paths[ranks] = math.prod(
                level_probabilities[level][rank] for level, rank in enumerate(ranks)
            )
    return paths


@pytest.mark.parametrize("widths", [[3, 3, 3], [5], [1, 4, 2], [2, 2, 2, 2], []])
def test_best_first_growth_equals_the_best_of_the_full_tree(widths):
    for seed in range(5):
        generator = seeded(seed)
        probabilities = [
            torch.rand(width + 1, generator=generator, dtype=torch.float64)
            .softmax(-1)[:width]
            .sort(descending=True)
            .values.tolist()
            for width in widths
        ]
        tokens = [torch.randperm(50, generator=generator)[:width].tolist() for width in widths]
        full = cartesian(probabilities)
        ranked = sorted(full, key=lambda ranks: -full[ranks])
        for budget in (1, 2, 5, 11, len(full), len(full) + 3):
            tree = grow_best_first(99, tokens, independent_children(probabilities), budget)
            expected = {
                (99, *(tokens[level][rank] for level, rank in enumerate(ranks))): full[ranks]
                for ranks in ranked[:budget]
            }
            assert token_paths(tree) == pytest.approx(expected, abs=1e-14)
            assert tree.confidences == sorted(tree.confidences, reverse=True)


def test_best_first_growth_with_children_that_depend_on_their_parent():
    generator = seeded(1)
    tokens, widths = [[3, 4, 5], [6, 7, 8], [9, 10, 11]], [1, 3, 3]
    tables = [
        torch.rand(width, 4, generator=generator, dtype=torch.float64).softmax(-1)[:, :3]
        for width in widths
    ]
    children = [
        [
            (row.argsort(descending=True).tolist(), sorted(row.tolist(), reverse=True))
            for row in table
        ]
        for table in tables
    ]
    paths = {(99,): 1.0}
    for first, second, third in product(range(3), repeat=3):
        probability = float(tables[0][0, first])
        paths[99, tokens[0][first]] = probability
        probability *= float(tables[1][first, second])
        paths[99, tokens[0][first], tokens[1][second]] = probability
        probability *= float(tables[2][second, third])
        paths[99, tokens[0][first], tokens[1][second], tokens[2][third]] = probability
    best = sorted(paths, key=lambda path: -paths[path])
    for budget in (1, 3, 8, 20, 40, 50):
        tree = grow_best_first(99, tokens, children, budget)
        expected = {path: paths[path] for path in best[:budget]}
        assert token_paths(tree) == pytest.approx(expected, abs=1e-14)


def brute_prune(tree: DraftTree, transitions: list[float], threshold: float, cap: int) -> list[int]:
    """Survivors by their whole path, then the `cap` largest products."""
    survivors = [
        node
        for node in range(len(tree))
        if all(transitions[step] >= threshold for step in tree.path(node)[1:])
    ]
    products = {
        node: math.prod(transitions[step] for step in tree.path(node)[1:]) for node in survivors
    }
    return sorted(sorted(survivors, key=lambda node: -products[node])[:cap])


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("cap", [1, 3, 6, 50])
def test_prune_keeps_no_orphan_and_no_more_than_the_cap(threshold, cap):
    pruned_away = 0
    for seed in range(12):
        generator = seeded(seed)
        tree = random_tree(14, generator)
        transitions = torch.rand(14, generator=generator, dtype=torch.float64).tolist()
        kept = prune(tree, transitions, threshold, cap)
        assert kept[0] == 0 and len(kept) <= cap
        assert all(tree.parents[node] in kept for node in kept[1:])
        assert kept == brute_prune(tree, transitions, threshold, cap)
        pruned_away += len(tree) - len(kept)
    assert (pruned_away == 0) == (threshold == 0.0 and cap == 50)


def test_no_threshold_keeps_even_a_transition_that_underflowed():
    assert prune(DraftTree.chain([7, 1, 2]), [1.0, 0.0, 0.5], 0.0, 8) == [0, 1, 2]


def test_equal_products_never_let_a_child_outlive_its_parent():
    tree = DraftTree([7, 1, 2, 3, 4], [-1, 0, 1, 0, 3])
    for cap in range(1, 6):
        kept = prune(tree, [1.0] * 5, 0.5, cap)
        assert len(kept) == cap
        assert all(tree.parents[node] in kept for node in kept[1:])
