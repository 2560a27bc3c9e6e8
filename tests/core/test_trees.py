"""Trees as tensors against the same operations over lists, for random trees and random batches."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.reference import (
    DraftTree,
    grow_best_first,
    most_confident,
    prune,
    union,
    verify_greedy,
)

from slipstream.core.drafts import Draft
from slipstream.core.growth import grow
from slipstream.core.trees import (
    Drawn,
    Trees,
    merge,
    most_probable,
    survivors,
)
from slipstream.core.verification import agreement, follow, paths_to, walk

FEW_TOKENS = 4


@st.composite
def drafts(draw, most: int = 12, distinct: bool = True, shares=(0.0, 1.0)) -> DraftTree:
    """A random draft. distinct: no two siblings are equal; shares: least and most that a child's
    confidence is of its parent's."""
    count = draw(st.integers(1, most))
    tokens, parents, confidences, taken = [7], [-1], [1.0], set()
    for node in range(1, count):
        parent = draw(st.integers(0, node - 1))
        token = draw(st.integers(0, FEW_TOKENS - 1))
        while distinct and (parent, token) in taken:
            token += 1
        taken.add((parent, token))
        tokens.append(token)
        parents.append(parent)
        confidences.append(confidences[parent] * draw(st.floats(*shares, width=32)))
    return DraftTree(tokens, parents, confidences)


batches = st.lists(drafts(), min_size=1, max_size=3)
any_batches = st.lists(drafts(distinct=False), min_size=1, max_size=3)
seeds = st.integers(0, 10**6)


def paths(draft: Draft) -> dict[tuple[int, ...], float]:
    """Confidence of every node, by the tokens along its path."""
    tree = DraftTree(draft.tokens, draft.parents, draft.confidences)
    return {
        tuple(tree.tokens[step] for step in tree.path(node)): tree.confidences[node]
        for node in range(len(tree))
    }


def same_paths(found: dict, expected: dict) -> bool:
    return found == pytest.approx(expected, rel=1e-5, abs=1e-12)


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
def test_invalid_drafts_are_refused(tokens, parents):
    with pytest.raises(ValueError):
        Draft(tokens, parents)


@given(any_batches)
def test_depths_and_ancestors_are_those_of_the_parents(batch):
    trees = Trees.of(batch)
    for place, draft in enumerate(batch):
        count = len(draft)
        assert trees.depths[place].tolist() == draft.depths() + [0] * (trees.width - count)
        assert trees.real[place].tolist() == [True] * count + [False] * (trees.width - count)
        for node in range(count):
            seen = trees.ancestors[place, node].nonzero().flatten().tolist()
            assert seen == draft.path(node)
        for node in range(count, trees.width):  # padding sees itself alone
            assert trees.ancestors[place, node].nonzero().flatten().tolist() == [node]


@given(any_batches, any_batches)
def test_batches_are_joined_and_parted_again(one, two):
    both = Trees.of(one).join(Trees.of(two))
    assert [draft.tokens for draft in both.drafts()] == [draft.tokens for draft in one + two]
    chosen = list(range(0, len(one + two), 2))
    parents = [draft.parents for draft in both.only(chosen).drafts()]
    assert parents == [(one + two)[place].parents for place in chosen]
    assert both.depth == max(max(draft.depths()) for draft in one + two)


@given(any_batches, seeds)
def test_what_is_followed_is_what_greedy_verification_accepts(batch, seed):
    """Also where siblings are equal: the first is followed, and both lead to the same tokens."""
    trees, random = Trees.of(batch), torch.Generator().manual_seed(seed)
    choices = torch.randint(0, FEW_TOKENS, trees.tokens.shape, generator=random)
    last = follow(trees, choices)
    nodes, counts = paths_to(trees, last)
    for place, draft in enumerate(batch):
        own = choices[place, : len(draft)].tolist()
        siblings = {(p, t) for p, t in zip(draft.parents, draft.tokens, strict=True)}
        path = nodes[place, : counts[place]].tolist()
        assert path == draft.path(path[-1]) and nodes.shape[1] == trees.depth + 1
        if len(siblings) == len(draft):
            assert (path, own[path[-1]]) == verify_greedy(draft, own)
        assert all(draft.tokens[b] == own[a] for a, b in pairwise(path))
        following = [n for n, p in enumerate(draft.parents) if p == path[-1]]
        if len(siblings) == len(draft):
            assert all(draft.tokens[node] != own[path[-1]] for node in following)


def test_nodes_that_are_only_looked_at_are_not_accepted():
    trees = Trees.of([Draft([7, 1, 2, 3], [-1, 0, 1, 0], [1.0, -1.0, -1.0, 0.0])])
    for token, expected in ((1, 0), (3, 3)):
        choices = torch.tensor([[token, 2, 5, 6]])
        last, tokens = walk(trees, lambda nodes, _, own=choices: own[0, nodes])
        assert follow(trees, choices).tolist() == last.tolist() == [expected]
        assert tokens.tolist() == [choices[0, expected]]


@given(batches, seeds)
def test_a_walk_finds_what_is_followed_and_asks_along_the_path_alone(batch, seed):
    trees = Trees.of(batch)
    generator = torch.Generator().manual_seed(seed)
    choices = torch.randint(0, FEW_TOKENS, (len(trees), trees.width), generator=generator)
    asked = []

    def choose(nodes: torch.Tensor, depth: int) -> torch.Tensor:
        asked.append(depth)
        assert (trees.depths[range(len(trees)), nodes] <= depth).all()
        return choices.gather(1, nodes[:, None])[:, 0]

    last, tokens = walk(trees, choose)
    assert last.tolist() == follow(trees, choices).tolist()
    assert tokens.tolist() == choices.gather(1, last[:, None])[:, 0].tolist()
    assert asked == [*range(trees.depth + 1)]


@given(batches, st.lists(st.integers(0, FEW_TOKENS - 1), max_size=6))
def test_agreement_counts_the_tokens_that_follow_on_some_path(batch, answer):
    trees = Trees.of(batch)
    answers = torch.tensor([[*answer, -1]] * len(batch))
    expected = [draft.agreement(answer) for draft in batch]
    assert agreement(trees, answers).tolist() == expected


@given(batches, st.integers(1, 14))
def test_the_most_probable_nodes_are_the_best_closed_set(batch, budget):
    trees = Trees.of(batch)
    chosen = trees.select(most_probable(trees, budget))
    for draft, found in zip(batch, chosen.drafts(), strict=True):
        expected = sorted(draft.confidences, reverse=True)[:budget]
        assert sorted(found.confidences, reverse=True) == pytest.approx(expected, rel=1e-5)
        assert paths(found).items() <= paths(Trees.of([draft]).drafts()[0]).items()
        if len(set(draft.confidences)) == len(draft):
            assert same_paths(paths(found), paths(draft.keep(most_confident(draft, budget))))


@given(st.lists(drafts(shares=(1.0, 1.0)), min_size=1, max_size=3), st.integers(1, 14))
def test_of_equal_nodes_no_child_is_chosen_without_its_parent(batch, budget):
    """`Draft` refuses a parent that is missing or comes later."""
    trees = Trees.of(batch)
    for draft, found in zip(
        batch, trees.select(most_probable(trees, budget)).drafts(), strict=True
    ):
        assert len(found) == min(budget, len(draft))


def test_a_child_counts_no_more_than_its_parent():
    trees = Trees.of([Draft([7, 1, 2, 3], [-1, 0, 0, 1], [1.0, 0.2, 0.5, 0.9])])
    assert most_probable(trees, 2).tolist() == [[0, 2]]
    assert most_probable(trees, 3).tolist() == [[0, 1, 2]]


@given(batches, seeds, st.sampled_from([0.0, 0.1, 0.5]), st.integers(1, 14))
def test_pruning_keeps_what_it_keeps_over_lists(batch, seed, threshold, cap):
    trees, random = Trees.of(batch), torch.Generator().manual_seed(seed)
    transitions = torch.rand(trees.tokens.shape, generator=random, dtype=torch.float64)
    nodes = survivors(trees, transitions, threshold, cap)
    assert nodes.shape[1] == min(cap, trees.width)
    for place, draft in enumerate(batch):
        kept = [node for node in nodes[place].tolist() if node >= 0]
        own = transitions[place, : len(draft)].tolist()
        assert kept == prune(draft, own, threshold, cap)
        assert nodes[place].tolist() == kept + [-1] * (nodes.shape[1] - len(kept))
    selected = trees.select(nodes)
    for place, draft in enumerate(batch):
        kept = [node for node in nodes[place].tolist() if node >= 0]
        assert selected.drafts()[place].parents == draft.keep(kept).parents


def test_no_threshold_keeps_even_a_transition_that_underflowed():
    trees = Trees.of([Draft.chain([7, 1, 2])])
    assert survivors(trees, torch.tensor([[1.0, 0.0, 0.5]]), 0.0, 8).tolist() == [[0, 1, 2]]


def test_equal_products_never_let_a_child_outlive_its_parent():
    trees = Trees.of([Draft([7, 1, 2, 3, 4], [-1, 0, 1, 0, 3])])
    for cap in range(1, 6):
        (kept,) = survivors(trees, torch.ones(1, 5), 0.5, cap).tolist()
        assert len(kept) == cap
        assert all(node == 0 or trees.parents[0, node] in kept for node in kept)


@given(st.lists(st.tuples(drafts(), drafts(), drafts()), min_size=1, max_size=2))
def test_a_merger_has_all_paths_with_the_higher_confidence(batch):
    columns = list(zip(*batch, strict=True))
    both, now = merge([Trees.of(column) for column in columns])
    starts = [0, *torch.tensor([Trees.of(column).width for column in columns]).cumsum(0).tolist()]
    for place, trees in enumerate(batch):
        expected, places = union(trees)
        assert same_paths(paths(both.drafts()[place]), paths(expected))
        for own, start, draft in zip(places, starts, trees, strict=False):
            for node in range(len(draft)):
                there = int(now[place, start + node])
                seen = both.ancestors[place, there].nonzero().flatten()
                tokens = both.tokens[place, seen].tolist()
                assert tokens == [expected.tokens[each] for each in expected.path(own[node])]


def test_a_merger_joins_equal_siblings_wherever_they_stand():
    repeated = Draft([7, 1, 1, 2, 3], [-1, 0, 0, 1, 2], [1.0, 0.2, 0.5, 0.1, 0.4])
    other = Draft([7, 1], [-1, 0], [1.0, 0.3])
    expected = {(7,): 1.0, (7, 1): 0.5, (7, 1, 2): 0.1, (7, 1, 3): 0.4}
    for one, two in ((repeated, other), (other, repeated)):
        both, _ = merge([Trees.of([one]), Trees.of([two])])
        assert same_paths(paths(both.drafts()[0]), expected)


def test_drawn_children_are_neither_merged_nor_left_out():
    trees = Trees.of([Draft.chain([7, 1])])
    trees.drawn = Drawn(torch.full((1, 2, 9), 1 / 9))
    with pytest.raises(ValueError, match="drawn"):
        merge([trees, Trees.of([Draft.chain([7, 1])])])
    with pytest.raises(ValueError, match="drawn"):
        trees.select(torch.tensor([[0]]))
    assert trees.padded(4).drawn.probabilities.shape == (1, 4, 9)
    assert trees.join(trees).only([1]).drawn.probabilities.shape == (1, 2, 9)


def random_levels(batch: int, levels: int, width: int, per_parent: int, seed: int, ties: bool):
    """Candidates as streams give them, children most probable first."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.rand(batch, levels, 50, generator=random).argsort(-1)[..., :width]
    weights = torch.rand(
        batch, levels, width, width + 1, generator=random, dtype=torch.float64
    ).softmax(-1)[..., :width]
    if ties:
        weights = torch.ones_like(weights)
    best = weights.sort(dim=-1, descending=True, stable=True)
    return tokens, best.indices[..., :per_parent], best.values[..., :per_parent]


shapes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))


@given(shapes, st.integers(1, 30), seeds, st.data())
def test_growth_is_the_best_tree_of_the_reference(shape, budget, seed, data):
    batch, levels, width = shape
    per_parent = data.draw(st.integers(1, width))
    depths = torch.tensor([data.draw(st.integers(0, levels)) for _ in range(batch)])
    tokens, children, probabilities = random_levels(batch, levels, width, per_parent, seed, False)
    roots = torch.arange(90, 90 + batch)
    grown = grow(roots, tokens, children, probabilities, budget, depths).drafts()
    for place, found in enumerate(grown):
        deep = int(depths[place])
        pairs = [
            [
                (
                    children[place, level, parent].tolist(),
                    probabilities[place, level, parent].tolist(),
                )
                for parent in range(width if level else 1)
            ]
            for level in range(deep)
        ]
        listed = tokens[place].tolist()[:deep]
        expected = grow_best_first(90 + place, listed, pairs, budget)
        assert same_paths(paths(found), paths(expected))
        assert found.confidences == sorted(found.confidences, reverse=True)


@given(shapes, st.integers(1, 30), seeds)
def test_growth_with_ties_puts_no_child_before_its_parent(shape, budget, seed):
    batch, levels, width = shape
    tokens, children, probabilities = random_levels(batch, levels, width, width, seed, True)
    depths = torch.full((batch,), levels)
    trees = grow(torch.arange(batch), tokens, children, probabilities, budget, depths)
    most = sum(width**depth for depth in range(levels + 1))
    for found in trees.drafts():  # `Draft` refuses parents that come later
        assert len(found) == min(budget, most)
        assert len(paths(found)) == len(found)


def test_nothing_of_probability_zero_is_grown():
    tokens, children, probabilities = random_levels(1, 2, 3, 3, 0, False)
    probabilities = probabilities * torch.tensor([1.0, 1.0, 0.0])
    trees = grow(torch.tensor([9]), tokens, children, probabilities, 50, torch.tensor([2]))
    assert len(trees.drafts()[0]) == 1 + 2 + 4
