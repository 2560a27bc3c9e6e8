"""One tree of several drafters' trees: what is chosen, and what is learnt from answers."""

import pytest
from slipstream.core.tree import DraftTree
from tests.commands import refused
from tests.drafters.untrained import combined, lookahead, spectra, unispec
from tests.tiny import tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.base import Context, Drafter, Step
from slipstream.drafters.combined import Combined, PromptRecord, Record, outcomes, together
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.prompt_lookup import AdaptiveNgram

PROMPT = [3, 14, 15, 9, 26, 5, 3, 14, 15]


def answered(drafter, target, **sampling):
    return Engine(target, drafter, Sampling(**sampling), Limits(24), 14).generate(PROMPT)


def test_words_of_several_drafters_count_as_far_as_they_have_proven():
    """Prompt lookup is never right here: its word wears off."""
    lookup = DraftTree([7, 1, 2], [-1, 0, 1], [1.0, 0.9, 0.81])
    other = DraftTree([7, 4], [-1, 0], [1.0, 0.5])
    record, (tree, words) = Record(), together([lookup, other])
    assert words == [(1.0, 1.0), (0.9, 0), (pytest.approx(0.9), None), (0, 0.5)]
    assert [record.proven(said) for said in words[1:]] == pytest.approx([0.9, 0.9, 0.5])
    for _ in range(50):
        for node, right in outcomes(tree, [4, 6]):
            record.count(words[node], right)
    assert record.proven(words[1]) == pytest.approx(0.9 * 3 / (50 * 0.9 + 3))
    assert record.proven(words[2]) == pytest.approx(0.9)  # of it nothing has been learned
    assert record.proven(words[3]) == pytest.approx(min(1, 0.5 * (50 + 3) / (50 * 0.5 + 3)))


def test_only_children_of_nodes_that_the_target_reached_are_tested():
    tree = DraftTree([7, 1, 2, 3, 4], [-1, 0, 0, 1, 3])
    assert list(outcomes(tree, [1, 5])) == [(1, True), (2, False), (3, False)]
    assert list(outcomes(tree, [1, 3])) == [(1, True), (2, False), (3, True)]
    assert list(outcomes(tree, [])) == []


def test_a_combination_believes_each_prompt_in_what_it_shows():
    """Both name one token each; in this prompt those of the second are right."""
    here, first, second = PromptRecord(), (0.6, 0), (0, 0.6)
    assert here.correction(first) == 1 > here.correction(second)
    for _ in range(20):
        here.count(first, right=False, expected=0.3)
        here.count(second, right=True, expected=0.3)
    assert here.correction(second) > 2 > 0.5 > here.correction(first)
    assert here.correction((None, 0.6)) == PromptRecord().correction((None, 0.6))


class Naming(Drafter):
    """Always names the same continuations of the root."""

    def __init__(self, parents: list[int], tokens: list[int], confidences: list[float]):
        self.tree = DraftTree([7, *tokens], [-1, *parents], [1.0, *confidences])

    def propose(self, contexts, budget):
        return [self.tree for _ in contexts]


def chosen(drafter: Combined, contexts: list[Context], budget: int) -> list[list[int]]:
    """Tokens that it drafts for each context."""
    return [tree.tokens[1:] for tree in drafter.propose(contexts, budget)]


def contexts_of(drafter: Combined, count: int) -> list[Context]:
    contexts = [Context([7], None, Sampling(), None) for _ in range(count)]
    drafter.begin(contexts, 2)
    drafter.foresee(contexts, None)
    return contexts


def test_each_prompt_gets_the_tokens_that_have_proven_right_in_it():
    drafter = Combined({"first": Naming([0], [1], [0.6]), "second": Naming([0], [2], [0.6])})
    contexts = contexts_of(drafter, 2)
    assert chosen(drafter, contexts, 2) == [[1], [1]]  # the first is trusted before the second
    for _ in range(10):
        trees = drafter.propose(contexts, 2)
        for place, right in enumerate((2, 1)):
            step = Step(trees[place], [0], right, None, None, sequence=place)
            drafter.observe(contexts[place], step)
    assert chosen(drafter, contexts, 2) == [[2], [1]]
    assert chosen(drafter, contexts_of(drafter, 1), 2) == [[1]]
    kinds = {(2, 0): 10, (0, 2): 10}
    assert drafter.record.right == kinds and drafter.record.claimed == pytest.approx(
        {kind: 20 * 0.6 for kind in kinds}
    )
    drafter.forget()
    assert not drafter.record.right


def test_a_combination_weighs_paths_and_not_single_tokens():
    """After 1, which is right in half of the cases, 2 is likely; 3 instead of 1 is likelier."""
    drafter = Combined({"only": Naming([0, 1, 0], [1, 2, 3], [0.5, 0.4, 0.45])})
    assert chosen(drafter, contexts_of(drafter, 1), 3) == [[1, 3]]


def test_words_of_like_confidence_are_of_one_kind():
    record = Record()
    for _ in range(20):
        record.count((0.95, None), False)
    assert record.proven((0.9, None)) < 0.2 and record.proven((0.3, None)) == 0.3


def test_a_combination_is_told_and_verified_as_its_parts_are():
    target = tiny_target()
    drafter = combined(more=AdaptiveNgram(2, 3))
    alone = answered(unispec(), target)
    assert answered(drafter, target).ids == alone.ids
    trees = drafter.trees
    assert len(trees) == 1 and all(len(said) == 3 for said in trees[0][1])
    assert drafter.store_bytes == sum(each.store_bytes for each in drafter.drafters)


def test_what_cannot_be_combined_is_refused():
    target = tiny_target()
    assert "cannot be parts" in refused(lambda: combined(more=lookahead()))
    assert "cannot be parts" in refused(lambda: combined(more=spectra()))
    assert "at least one" in refused(lambda: Combined({}))
    sampled = combined(more=DraftModel(target, 3))
    assert "cannot be combined" in refused(lambda: answered(sampled, target, temperature=1.0))
