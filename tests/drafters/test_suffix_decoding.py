"""Suffix decoding against a suffix tree that is really built, as its paper has it."""

import random
from collections import Counter

import pytest
from tests.tiny import tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.suffix_decoding import END, SuffixDecoding, Texts

DEPTH, LONGEST = 5, 12


def counted(texts: list[list[int]]) -> Counter:
    """How often each run of up to `LONGEST` tokens occurs: the counts of the tree's nodes."""
    return Counter(
        tuple(text[start:stop])
        for text in texts
        for start in range(len(text))
        for stop in range(start + 1, min(len(text), start + LONGEST) + 1)
    )


def greedily(counts: Counter, ending: tuple[int, ...], most: int) -> list[float]:
    """Algorithm 1: D of the nodes of the greedy tree after an ending; D = D(parent) C / C(parent),
    the most probable node first."""
    nodes, found = {ending: 1.0}, []
    open_nodes = {run: 1.0 for run in [ending]}
    children: dict[tuple[int, ...], float] = {}
    for _ in range(most):
        for run, above in open_nodes.items():
            for token in range(5):
                own = counts[(*run, token)]
                if own:
                    children[(*run, token)] = above * own / counts[run]
        if not children:
            break
        best = max(children, key=children.get)
        open_nodes = {best: children.pop(best)}
        nodes |= open_nodes
        found.append(nodes[best])
    return found


def best_score(counts: Counter, text: list[int], budget: int, factor: float) -> float:
    """The score of the best tree over all endings that occur."""
    found = [0.0]
    for size in range(1, DEPTH + 1):
        ending = tuple(text[-size:])
        if len(ending) == size and counts[ending]:
            found.append(sum(greedily(counts, ending, min(budget - 1, int(factor * size)))))
    return max(found)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kinds", [2, 4])
def test_the_draft_is_the_best_tree_of_a_suffix_tree(seed, kinds):
    chance = random.Random(seed)
    text = [chance.randrange(kinds) for _ in range(40)]
    others = [[chance.randrange(kinds) for _ in range(12)] for _ in range(4)]
    own, earlier = Texts(text), Texts([token for each in others for token in (*each, END)])
    extent, budget = (DEPTH, 1.5, 0.0), 6
    for texts, given in ((own, [text]), (earlier, others)):
        draft = texts.best(text, budget, *extent)
        counts = counted(given)
        assert sum(draft.confidences[1:]) == pytest.approx(best_score(counts, text, budget, 1.5))
        assert draft.tokens[0] == text[-1] and END not in draft.tokens and len(draft) <= budget


def test_unlikely_tokens_and_more_than_the_ending_allows_are_left_out():
    """After 1: 2 three times and 3 once, and the end."""
    texts = Texts([1, 2, 9, 1, 2, 8, 1, 2, 7, 1, 3, 6, 1])
    assert texts.best([5, 1], 8, 4, 2.0, 0.3).tokens == [1, 2]
    assert texts.best([5, 1], 8, 4, 3.0, 0.1).tokens == [1, 2, 3, 6]
    assert texts.best([5, 1], 8, 4, 1.0, 0.1).tokens == [1, 2]


def test_earlier_answers_are_drafted_from_and_the_oldest_forgotten():
    target, prompt, limits = tiny_target(), [3, 1, 4, 1, 5], Limits(20)
    kept = SuffixDecoding(8, 2.0, 0.0, kept=64).attach(target)
    engine = Engine(target, kept, Sampling(), limits, 6)
    first, second = engine.generate(prompt), engine.generate(prompt)
    assert first.ids == second.ids and sum(second.accepted) > sum(first.accepted)
    assert len(kept.kept[-1]) == 2 * (len(first.ids) + 1)
    for seed in range(4):
        engine.generate([seed, *prompt])
    assert 32 <= sum(map(len, kept.kept)) <= 64 + len(first.ids) + 1
    kept.forget()
    assert engine.generate(prompt).accepted == first.accepted
