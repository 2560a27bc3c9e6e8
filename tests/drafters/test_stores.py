"""What training-free drafters store, against plain forwards and searches by hand."""

import random
from itertools import product

import numpy as np
import pytest
import torch
from slipstream.core.tree import DraftTree
from tests.commands import refused
from tests.drafters.untrained import (
    Texts,
    lookahead,
    retrieval,
    spectra,
    unispec,
    untrained,
)
from tests.tiny import VOCABULARY, tiny_target

from slipstream.core.growth import grow_by_confidence
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.memory import bytes_of
from slipstream.drafters.ngrams import Followers, LastPlaces
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.rest import Rest
from slipstream.drafters.spectra import Dictionaries
from slipstream.drafters.suffixes import COMPARED, Retrieval, SuffixStore
from slipstream.drafters.unispec import UniSpec

LENGTH = 24
PROMPT = [3, 14, 15, 9, 26, 5, 3, 14, 15]


def texts_of(seed: int, count: int = 6, vocabulary: int = 3) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        [chance.randrange(vocabulary) for _ in range(chance.randrange(1, 30))] for _ in range(count)
    ]


def occurrences(texts: list[list[int]], ngram: list[int]) -> list[list[int]]:
    """What follows each occurrence."""
    size = len(ngram)
    return [
        text[start + size :]
        for text in texts
        for start in range(len(text) - size + 1)
        if text[start : start + size] == ngram
    ]


@pytest.mark.parametrize("seed", range(4))
def test_the_suffix_store_finds_what_a_search_finds(seed, tmp_path):
    texts = texts_of(seed)
    SuffixStore.of_texts(texts).save(tmp_path / "store", {})
    store = SuffixStore.open(tmp_path / "store")
    asked = [list(ngram) for size in (1, 2, 4) for ngram in product(range(3), repeat=size)]
    for ngram in [*asked, *(text[-COMPARED:] for text in texts), [7], [0, 7]]:
        low, high = store.find(ngram)
        found = store.after(np.arange(low, high), len(ngram), 99)
        assert sorted(found) == sorted(occurrences(texts, ngram))
        longest = store.longest([2, 1, *ngram], COMPARED)
        sizes = [n for n in range(1, len(ngram) + 3) if occurrences(texts, [2, 1, *ngram][-n:])]
        assert longest[2] == min(COMPARED, max(sizes, default=0))


def test_long_repeats_are_sorted_no_further_than_they_are_compared():
    store = SuffixStore.of_texts([[1] * 200, [1] * 50 + [2]])
    low, high = store.find([1] * COMPARED)
    assert high - low == 200 - COMPARED + 1 + 50 - COMPARED + 1


def test_a_folder_without_a_store_is_refused(tmp_path):
    assert "holds no whole store" in refused(lambda: SuffixStore.open(tmp_path))


def test_retrieved_continuations_come_by_their_share():
    """After [1, 2]: 3 twice, once followed by 4; 5 once."""
    rest = Rest(retrieval([[1, 2, 3, 4], [1, 2, 3], [1, 2, 5], [9, 9]]))
    rest.bind(tiny_target())
    assert rest.retrieval.counted([9, 1, 2]) == [
        ((3,), pytest.approx(2 / 3)),
        ((5,), pytest.approx(1 / 3)),
        ((3, 4), pytest.approx(1 / 3)),
    ]
    assert rest.retrieval.continuations([9, 1, 2]) == [(5,), (3, 4)]
    assert rest.retrieval.counted([8]) == []
    assert rest.store_bytes == 8 * (4 + 3 + 3 + 2 + 4)


def test_retrieval_looks_at_occurrences_evenly():
    """Of 100 occurrences, every tenth."""
    texts = [[1, 2 + number] for number in range(100)]
    found = Retrieval(Texts(texts), max_ngram=1, max_matches=10, length=1)
    found.bind(tiny_target())
    assert sorted(path for path, _ in found.counted([1])) == [(2 + n,) for n in range(0, 100, 10)]


@pytest.mark.parametrize("seed", range(3))
def test_indexes_of_a_growing_text_find_what_a_search_finds(seed):
    chance = random.Random(seed)
    text, places, followers = [chance.randrange(4)], LastPlaces(3), Followers(3)
    for _ in range(60):
        text += [chance.randrange(4) for _ in range(chance.randrange(1, 4))]
        places.extend(text)
        followers.extend(text)
        for size in (3, 2, 1):
            ends = [n for n in range(size, len(text)) if text[n - size : n] == text[-size:]]
            if ends:
                assert places.continuation(text, 5)[0] == text[ends[-1] : ends[-1] + 5]
                next_ones = [text[end] for end in ends]
                likeliest, share = (each[0] for each in followers.continuation(text, 1))
                assert next_ones.count(likeliest) == max(map(next_ones.count, next_ones))
                assert share == pytest.approx(next_ones.count(likeliest) / len(ends))
                break
        else:
            assert places.continuation(text, 5) == followers.continuation(text, 5) == ([], [])


def test_prompt_lookup_continues_the_last_occurrence_and_adaptive_ngrams_the_most_frequent():
    """1 2 was followed by 3, 3 and last by 4."""
    text = [1, 2, 3, 5, 1, 2, 3, 6, 1, 2, 4, 7, 1, 2]
    last, most = LastPlaces(2), Followers(2)
    last.extend(text)
    most.extend(text)
    assert last.continuation(text, 2) == ([4, 7], [pytest.approx(2 / 3), pytest.approx(3 / 4)])
    assert most.continuation(text, 2)[0] == [3, 6]  # 3 5 and 3 6 occurred once each


def algorithm_1(store: dict, root: int, budget: int, depth: int, k: int, least: float) -> set:
    """The paths of UNISPEC's tree as its Algorithm 1 has them: level by level, the k most confident
    nodes of a level have children, save those below `least`; the most confident nodes of all are
    drafted, whether they had children or not."""
    leaves, nodes = [((), root, 1.0)], []
    for _ in range(depth):
        level = [
            ((*path, token), token, confidence * probability)
            for path, above, confidence in leaves
            for token, probability in zip(*store[above], strict=True)
        ]
        nodes += level
        leaves = [node for node in sorted(level, key=lambda node: -node[2])[:k] if node[2] >= least]
    best = sorted(nodes, key=lambda node: -node[2])[: budget - 1]
    return {path for path, _, _ in best}


@pytest.mark.parametrize("seed", range(8))
def test_best_first_growth_is_the_tree_of_algorithm_1(seed):
    chance = random.Random(seed)
    store = {}
    for token in range(12):
        tokens = chance.sample(range(12), 6)
        weights = sorted((chance.random() for _ in tokens), reverse=True)
        store[token] = tokens, [0.9 * weight / sum(weights) for weight in weights]
    for budget, depth, k, least in product((2, 9, 40), (1, 3, 6), (2, 6), (0.0, 0.05)):
        tree = grow_by_confidence(3, lambda token, _: store[token], budget, depth, least, k)
        paths = {
            tuple(tree.tokens[each] for each in tree.path(node)[1:]) for node in range(1, len(tree))
        }
        assert paths == algorithm_1(store, 3, budget, depth, k, least)
        assert len(paths) == len(tree) - 1
        assert tree.confidences == sorted(tree.confidences, reverse=True)


def answered(drafter, target, prompt=PROMPT, budget: int = 14, **sampling):
    engine = Engine(target, drafter, Sampling(**sampling), Limits(LENGTH), budget)
    return engine.generate(prompt)


def test_nodes_below_the_threshold_are_drafted_and_have_no_children():
    doubtful = []

    class Watched(UniSpec):
        def propose(self, contexts, budget):
            (tree,) = super().propose(contexts, budget)
            parents = set(tree.parents)
            for node in range(1, len(tree)):
                if tree.confidences[node] < self.threshold:
                    assert node not in parents
                    doubtful.append(node)
            return [tree]

    answered(unispec(Watched, threshold=0.3), tiny_target())
    assert doubtful


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_stored_successors_are_the_targets_own_predictions(temperature):
    """After every step the store has, for the tokens of its tree, the target's likeliest successors
    in that place; of equal tokens those of the last accepted node, else of the likeliest."""
    target, seen = tiny_target(), []

    class Watched(UniSpec):
        def propose(self, contexts, budget):
            self.before = list(contexts[0].tokens)
            return super().propose(contexts, budget)

        def observe(self, context, step):
            super().observe(context, step)
            tree, text = step.tree, getattr(self, "before", context.tokens[: len(PROMPT)])
            if step.path == list(range(len(PROMPT))) and len(tree) == len(PROMPT):
                return  # the prompt, looked at below
            for node in range(len(tree)):
                alike = [n for n in range(len(tree)) if tree.tokens[n] == tree.tokens[node]]
                accepted = [n for n in alike if n in step.path]
                if node != (accepted[-1] if accepted else alike[0]):
                    continue
                path = [tree.tokens[each] for each in tree.path(node)]
                logits = target.model(torch.tensor([[*text[:-1], *path]])).logits[0, -1]
                best = (logits / (temperature or 1.0)).softmax(-1).topk(2)
                tokens, probabilities = context.state.store.of(tree.tokens[node])
                assert tokens == best.indices.tolist()
                assert probabilities == pytest.approx(best.values.tolist(), abs=1e-6)
                seen.append(node)
            best = logits_after(target, [*text[:-1], *(tree.tokens[n] for n in step.path)]).topk(2)
            assert context.state.instead[0] == best.indices.tolist()

    answered(unispec(Watched, threshold=0.0), target, temperature=temperature)
    assert max(seen) > 3


def logits_after(target, text: list[int]) -> torch.Tensor:
    return target.model(torch.tensor([text])).logits[0, -1]


@pytest.mark.parametrize("whole", [False, True])
def test_the_prompt_is_stored_whole_or_its_last_token_alone(whole, monkeypatch):
    monkeypatch.setattr("slipstream.decoding.decoder.PREFILL_ROWS", 4)
    target, drafter = tiny_target(), unispec(prompt=whole)
    stored = []

    def propose(contexts, budget):
        stored.append(set(contexts[0].state.store.known))
        return [DraftTree.chain(context.tokens[-1:]) for context in contexts]

    drafter.propose = propose
    answered(drafter, target, [1, 2, 3, 4, 5, 6])
    assert stored[0] == ({5, 6} if whole else {6})  # of the prompt's last part
    tokens, _ = drafter.stores[0].of(6)
    assert tokens == logits_after(target, [1, 2, 3, 4, 5, 6]).topk(2).indices.tolist()


def test_windows_and_candidates_are_extended_by_what_the_target_says_there():
    target, checked = tiny_target(), []

    class WatchedLookahead(type(lookahead())):
        def propose(self, contexts, budget):
            self.before = list(contexts[0].tokens)
            self.paths = contexts[0].state.paths()
            return super().propose(contexts, budget)

        def observe(self, context, step):
            super().observe(context, step)
            if step.foreseen:
                said = [
                    int(logits_after(target, self.before + path).argmax()) for path in self.paths
                ]
                assert context.state.generations[-1] == said
                checked.append("window")

    class WatchedSpectra(type(spectra())):
        def propose(self, contexts, budget):
            self.before = list(contexts[0].tokens)
            self.candidates_then = [list(each) for each in contexts[0].state.sequences]
            self.keys = set(contexts[0].state.stored.forward.continuations)
            return super().propose(contexts, budget)

        def observe(self, context, step):
            pool, keys = context.state, set(context.state.stored.forward.continuations)
            super().observe(context, step)
            if not step.foreseen:
                return
            for then, now in zip(self.candidates_then, pool.sequences, strict=True):
                ranked = logits_after(target, self.before + then[1:]).argsort(descending=True)
                if self.unseen_probability:
                    ranked = [int(each) for each in ranked if int(each) not in keys]
                assert now == [*then[1:], int(ranked[0])]
                keys |= {now[0], now[1]}
                checked.append("candidate")

    settings = dict(
        candidates=2, ngram=3, guesses=3, forward=True, backward=True, order="backward_first",
        chain=6, backward_share=0.75, sub_ngrams=True, retrieval=None, text=False, keep=False,
    )  # fmt: skip
    answered(
        WatchedLookahead(window=3, ngram=4, guesses=3, text=False, retrieval=None, keep=False),
        target,
    )
    for probability in (0.0, 1.0):
        answered(WatchedSpectra(**settings, unseen_probability=probability), target)
    assert {"window", "candidate"} == set(checked) and len(checked) > 60


@pytest.mark.parametrize(
    ("trust", "scores"),
    [(1.0, [0.9, 0.05]), (0.0, [0.5, 0.2]), (0.3, [0.3 * 0.9 + 0.35, 0.3 * 0.05 + 0.14])],
)
def test_stored_probabilities_count_as_far_as_they_are_trusted(trust, scores):
    tokens, found = unispec(trust=trust).scored(([2, 3], [0.9, 0.05]))
    assert tokens == [2, 3] and found == pytest.approx(scores)


def test_dictionaries_hold_all_parts_of_a_candidate_or_whole_ones_alone():
    parts, whole = Dictionaries(4, 5, True), Dictionaries(4, 5, False)
    for stored in (parts, whole):
        stored.add([1, 2, 3, 4])
    assert list(parts.forward.starting_with(1)) == [(2, 3, 4)]
    assert list(parts.forward.starting_with(2)) == [(3, 4)]
    assert list(parts.forward.starting_with(3)) == [(4,)] and 4 not in parts.forward
    assert parts.backward == {(1, 2, 3): 4, (2, 3): 4, (3,): 4}
    assert list(whole.forward.starting_with(2)) == [] and whole.backward == {(1, 2, 3): 4}
    parts.add([3, 4, 5, 6])
    assert parts.chain([9, 2, 3], 8) == [4]  # (2, 3) -> 4; nothing is known to follow 4 here ...
    parts.add([0, 3, 4, 7])
    assert parts.chain([9, 2, 3], 8) == [4, 7]  # ... and now 7 follows (3, 4)
    parts.add([1, 2, 1, 2])
    parts.add([2, 1, 2, 1])
    assert parts.chain([9, 1, 2], 8) == [1, 2] * 4  # no further, though it might go on for ever


@pytest.mark.parametrize("name", untrained([]))
def test_stores_are_forgotten_from_prompt_to_prompt_unless_they_are_kept(name):
    target = tiny_target()
    texts = [[1, 2, 3], [4, 5, 6]]
    drafter = untrained(texts)[name]
    engine = Engine(target, drafter, Sampling(), Limits(LENGTH), 14)
    forwards = [engine.generate(PROMPT).statistics.target_forwards for _ in range(3)]
    batch = engine.generate_batch([[1, 2], PROMPT, [7] * 5])
    if "kept" in name:
        assert forwards[1] < forwards[0]
    elif name != "combined":  # it keeps a record of how often its drafters were right
        assert len(set(forwards)) == 1
        assert batch[1].statistics.target_forwards == forwards[0]
    assert drafter.store_bytes > 0


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: unispec(top_k=0), "drafter.top_k"),
        (lambda: unispec(threshold=1.0), "drafter.threshold"),
        (lambda: unispec(trust=1.5), "drafter.trust"),
        (lambda: unispec(ranks=[0.5]), "drafter.ranks: give top_k"),
        (lambda: unispec(ranks=[0.2, 0.5]), "drafter.ranks: none"),
        (lambda: lookahead(ngram=1), "ngram of at least 2"),
        (lambda: spectra(candidates=0), "at least 1 guess and 1 candidate"),
        (lambda: spectra(unseen_probability=1.5), "drafter.unseen_probability"),
        (lambda: spectra(order="both"), "drafter.order: must be one of backward_first, forward"),
        (lambda: spectra(chain=0), "drafter.chain: must be at least 1"),
        (lambda: spectra(backward_share=0.0), "drafter.backward_share"),
        (lambda: Retrieval(Texts([]), COMPARED + 1, 1, 1), "max_ngram between 1 and"),
        (lambda: PromptLookup(0, 1), "drafter.max_ngram"),
    ],
)
def test_settings_out_of_range_are_refused(make, field):
    assert field in refused(make)


def test_memory_counts_each_object_once():
    ngram = (1000, 2000)
    once, twice = bytes_of([{ngram: 5}]), bytes_of([{ngram: 5, (3000,): ngram}])
    assert 0 < once < twice < once + 400


def test_budgets_that_leave_no_room_still_decode():
    target = tiny_target()
    plain = answered(unispec(), target).ids
    for budget in (1, 2, 3, 5):
        for name, drafter in untrained([[1, 2, 3]]).items():
            assert answered(drafter, target, budget=budget).ids == plain, name
    for prompt in ([5], [VOCABULARY - 1] * 2):
        expected = answered(PromptLookup(1, 1), target, prompt).ids
        for name, drafter in untrained([[1, 2, 3]]).items():
            assert answered(drafter, target, prompt).ids == expected, name
