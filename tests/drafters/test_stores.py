"""What training-free drafters store, against plain forwards and searches by hand."""

import random
import time
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.commands import config_of, refused
from tests.drafters.untrained import (
    Texts,
    lookahead,
    retrieval,
    spectra,
    unispec,
    untrained,
    watched,
)
from tests.exhaustive import sparing
from tests.reference import DraftTree
from tests.tiny import VOCABULARY, tiny_target

from slipstream.configuration import build
from slipstream.core.drafts import Draft, grow_by_confidence
from slipstream.core.sampling import Sampling
from slipstream.core.trees import Trees
from slipstream.core.verification import follow
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters import suffix_decoding
from slipstream.drafters.auto import Auto
from slipstream.drafters.base import bytes_of
from slipstream.drafters.draft_length import DraftLength
from slipstream.drafters.guesses import GuessPool, num_branches
from slipstream.drafters.ngrams import Followers, LastPlaces
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.rest import Rest
from slipstream.drafters.spectra import Dictionaries
from slipstream.drafters.suffix_decoding import SuffixDecoding
from slipstream.drafters.suffixes import COMPARED, Retrieval, SuffixStore
from slipstream.drafters.unispec import READINGS

LENGTH = 24
RECORDS = ("combined", "auto")
"""They keep a record, across prompts, of what their drafters were worth."""
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
    SuffixStore.of_texts(texts).save(tmp_path / "store")
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


def test_a_store_of_tokens_that_the_target_lacks_is_refused(tmp_path):
    SuffixStore.of_texts([[1, 7], [2]]).save(tmp_path)
    assert SuffixStore.open(tmp_path, 8).find([7]) != (0, 0)
    assert "beyond the 7 of the target" in refused(lambda: SuffixStore.open(tmp_path, 7))


def test_retrieved_continuations_come_by_their_share():
    """After [1, 2]: 3 twice, once followed by 4; 5 once."""
    rest = Rest(retrieval([[1, 2, 3, 4], [1, 2, 3], [1, 2, 5], [9, 9]])).attach(tiny_target())
    assert rest.retrieved.counted([9, 1, 2]) == [
        ((3,), pytest.approx(2 / 3)),
        ((5,), pytest.approx(1 / 3)),
        ((3, 4), pytest.approx(1 / 3)),
    ]
    assert rest.retrieved.continuations([9, 1, 2]) == [(5,), (3, 4)]
    assert rest.retrieved.counted([8]) == []
    assert rest.memory() == 8 * (4 + 3 + 3 + 2 + 4)


def test_retrieval_looks_at_occurrences_evenly():
    """Of 100 occurrences, every tenth."""
    texts = [[1, 2 + number] for number in range(100)]
    settings = Retrieval(Texts(texts), max_ngram=1, max_matches=10, length=1)
    found = settings.attach(tiny_target())
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
                likeliest, sure = (each[0] for each in followers.continuation(text, 1))
                assert next_ones.count(likeliest) == max(map(next_ones.count, next_ones))
                seen = size**2 * next_ones.count(likeliest)
                assert sure == pytest.approx(seen / (size**2 * len(ends) + 2))
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
        tree = DraftTree(tree.tokens, tree.parents, tree.confidences)
        paths = {
            tuple(tree.tokens[each] for each in tree.path(node)[1:]) for node in range(1, len(tree))
        }
        assert paths == algorithm_1(store, 3, budget, depth, k, least)
        assert len(paths) == len(tree) - 1
        assert tree.confidences == sorted(tree.confidences, reverse=True)


def test_the_tree_of_token_recycling_has_one_shape_whatever_is_stored():
    """80 nodes, eight successors, six levels: which ranks are on a path does not depend on what the
    target said, and how probable, but on what is usual for each rank."""
    settings = build(config_of("infer", "drafter=token_recycling").drafter)
    attached, shapes = settings.attach(tiny_target()), set()
    for seed in range(3):
        chance, known = random.Random(seed), attached.state(None, 80)
        for token in range(VOCABULARY):
            probabilities = sorted((chance.random() for _ in range(8)), reverse=True)
            known.store[token] = chance.sample(range(VOCABULARY), 8), probabilities
        draft = attached.drafted(SimpleNamespace(tokens=[3], room=50), known, 80)
        tokens, ranks = [()], [()]
        for token, parent in zip(draft.tokens[1:], draft.parents[1:], strict=True):
            tokens.append((*tokens[parent], token))
            rank = known.store[draft.tokens[parent]][0].index(token)
            ranks.append((*ranks[parent], rank))
        usual = {token: settings.scored(own, 0.0) for token, own in known.store.items()}
        assert set(tokens[1:]) == algorithm_1(usual, 3, 80, 6, 8, 0.0) and len(draft) == 80
        shapes.add(frozenset(ranks))
    (shape,) = shapes
    assert max(map(len, shape)) > 3 and (7,) in shape


@pytest.mark.parametrize(("reading", "drafted"), [("product", [7, 1, 2]), ("local", [7, 1, 3])])
def test_a_path_is_as_confident_as_its_reading_says(reading, drafted):
    """3 comes after 1 with 0.55: alone that is more than 0.5, along the path 0.6 * 0.55 is less."""
    store = {7: ([1, 2], [0.6, 0.5]), 1: ([3], [0.55]), 2: ([], []), 3: ([], [])}
    along = READINGS[reading]
    tree = grow_by_confidence(7, lambda token, _: store[token], 3, 2, along=along)
    assert tree.tokens == drafted
    assert "drafter.reading" in refused(lambda: unispec(reading="sum"))


def test_presets_have_the_settings_of_their_papers():
    """N 5, W 15, G 15: of 121 nodes, 15 candidates and 15 guesses have four each (SPECTRA, and
    Lookahead for 7B models); UNISPEC: k 10, d 10, r 0.05."""
    methods = config_of("infer", "methods=papers").methods
    for name in ("spectra", "lookahead"):
        found = methods[name].drafter
        count = found.candidates if name == "spectra" else found.window
        assert (count, found.ngram, found.guesses, found.text) == (15, 5, 15, False)
        assert num_branches(15, 5, methods[name].budget) == 15
        assert methods[name].budget - 1 == 15 * 4 + 15 * 4
    chosen = methods.spectra.drafter
    assert (chosen.order, chosen.chain, chosen.backward_share) == ("forward_first", 5, 1.0)
    found = methods.unispec.drafter
    assert (found.top_k, found.max_depth, found.threshold, found.trust) == (10, 10, 0.05, 1.0)
    assert (found.reading, found.prompt, found.keep) == ("product", False, False)
    assert (methods.unispec.budget, methods.token_recycling.budget) == (110, 80)
    for name in ("lookahead", "token_recycling", "spectra", "unispec"):
        assert build(methods[name].drafter).additions() == [], name
    assert build(methods.spectra_likeliest.drafter).additions() == ["unseen_probability"]


def test_tables_name_by_which_settings_a_drafter_goes_beyond_its_paper():
    methods, target = config_of("infer", "methods=drafters").methods, tiny_target()
    details = {
        name: build(methods[name].drafter).attach(target).details
        for name in ("anpd", "lookahead", "token_recycling", "unispec", "spectra", "combined_text")
    }
    spectra = "text, branches, unseen_probability, order, chain, backward_share"
    assert details == dict(anpd="", lookahead="text, branches", token_recycling="prompt",
                           unispec="prompt, trust", spectra=spectra,
                           combined_text="unispec (prompt, trust)")  # fmt: skip


@pytest.mark.parametrize("make", [lookahead, spectra])
def test_branches_are_drafts_where_this_is_asked_for_alone(make):
    """In the papers they are extended, and not verified; guesses are."""
    request = SimpleNamespace(tokens=[3, 1, 4], room=9)
    for accept in (True, False):
        attached = make(accept_branches=accept).attach(tiny_target())
        state = attached.state(request, 14)
        state.stored.add([4, 9, 5])
        trees = Trees.of([attached.drafted(request, state, 14)])
        path, choices = state.paths()[0], torch.zeros_like(trees.tokens)
        choices[0, 0] = path[0]
        assert path[0] != 9 and (int(follow(trees, choices)) > 0) == accept
        choices[0, 0] = 9
        assert int(follow(trees, choices)) == 1


def answered(drafter, target, prompt=PROMPT, budget: int = 14, **sampling):
    engine = Engine(target, drafter, Sampling(**sampling), Limits(LENGTH), budget)
    return engine.generate(prompt)


def test_nodes_below_the_threshold_are_drafted_and_have_no_children():
    doubtful = []

    def watch(session):
        drafted = session.attached.drafted

        def noted(*arguments):
            draft = drafted(*arguments)
            low = {node for node in range(1, len(draft)) if draft.confidences[node] < 0.3}
            assert not low & set(draft.parents)
            doubtful.extend(low)
            return draft

        session.attached.drafted = noted

    target = tiny_target()
    answered(watched(unispec(threshold=0.3), target, watch), target)
    assert doubtful


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_stored_successors_are_the_targets_own_predictions(temperature):
    """After every step the store has, for the tokens of its tree, the target's likeliest successors
    in that place; of equal tokens those of the last accepted node, else of the likeliest."""
    target, seen = tiny_target(), []

    def watch(session):
        learn = session.attached.learn

        def noted(verified, states, brought):
            learn(verified, states, brought)
            if verified.prompt:
                return  # looked at below
            (draft,), (decided,), (known,) = (
                verified.trees.drafts(),
                verified.host(),
                session.states,
            )
            tree, path = DraftTree(draft.tokens, draft.parents), verified.paths[0].tolist()
            path, text = path[: int(verified.counts)], verified.requests[0].tokens[: -len(decided)]
            for node in range(len(tree)):
                alike = [n for n in range(len(tree)) if tree.tokens[n] == tree.tokens[node]]
                accepted = [n for n in alike if n in path]
                if node != (accepted[-1] if accepted else alike[0]):
                    continue
                tokens = [tree.tokens[each] for each in tree.path(node)]
                logits = logits_after(target, [*text[:-1], *tokens])
                best = (logits / (temperature or 1.0)).softmax(-1).topk(2)
                tokens, probabilities = known.store[tree.tokens[node]]
                assert tokens == best.indices.tolist()
                assert probabilities == pytest.approx(best.values.tolist(), abs=1e-6)
                seen.append(node)
            best = logits_after(target, [*text[:-1], *(tree.tokens[n] for n in path)]).topk(2)
            assert known.instead[0] == best.indices.tolist()

        session.attached.learn = noted

    answered(watched(unispec(threshold=0.0), target, watch), target, temperature=temperature)
    assert max(seen) > 3


def logits_after(target, text: list[int]) -> torch.Tensor:
    return target.model(torch.tensor([text])).logits[0, -1]


@pytest.mark.parametrize("whole", [False, True])
def test_the_prompt_is_stored_whole_or_its_last_token_alone(whole, monkeypatch):
    monkeypatch.setattr("slipstream.decoding.decoder.PREFILL_ROWS", 4)
    target, stored = tiny_target(), []

    def watch(session):
        def drafted(request, state, budget):
            stored.append((set(state.store), state.store[6][0]))
            return Draft(request.tokens[-1:], [-1])

        session.attached.drafted = drafted

    answered(watched(unispec(prompt=whole), target, watch), target, [1, 2, 3, 4, 5, 6])
    known, successors = stored[0]
    assert known == ({3, 4, 5, 6} if whole else {6})  # of the prompt's last part
    assert successors == logits_after(target, [1, 2, 3, 4, 5, 6]).topk(2).indices.tolist()


def test_lookahead_branches_are_extended_by_what_the_target_says_there():
    """Lookahead's window: with the likeliest token after each column."""
    target, checked = tiny_target(), []

    def watch(session):
        drafted, learn = session.attached.drafted, session.attached.learn

        def noted(request, state, budget):
            session.before = list(request.tokens), state.paths()
            return drafted(request, state, budget)

        def extended(verified, states, brought):
            learn(verified, states, brought)
            if not verified.prompt:
                text, paths = session.before
                said = [int(logits_after(target, text + path).argmax()) for path in paths]
                assert session.states[0].generations[-1] == said
                checked.append(said)

        session.attached.drafted, session.attached.learn = noted, extended

    answered(watched(lookahead(window=3, ngram=4), target, watch), target)
    assert len(checked) > 10


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_candidates_are_extended_by_what_the_target_says_there(probability):
    """SPECTRA's: by the likeliest token, or the likeliest that is no key of the forward
    dictionary."""
    target, checked = tiny_target(), []

    def watch(session):
        drafted, learn = session.attached.drafted, session.attached.learn

        def noted(request, state, budget):
            session.before = list(request.tokens), [list(each) for each in state.sequences]
            return drafted(request, state, budget)

        def extended(verified, states, brought):
            (state,) = states
            keys = set(state.stored.continuations)
            learn(verified, states, brought)
            if verified.prompt:
                return
            text, candidates = session.before
            for then, now in zip(candidates, state.sequences, strict=True):
                ranked = logits_after(target, text + then[1:]).argsort(descending=True).tolist()
                if probability:
                    ranked = [each for each in ranked if each not in keys]
                assert now == [*then[1:], ranked[0]]
                checked.append(now)

        session.attached.drafted, session.attached.learn = noted, extended

    answered(watched(spectra(unseen_probability=probability), target, watch), target)
    assert len(checked) > 20


@pytest.mark.parametrize(
    ("trust", "scores"),
    [(1.0, [0.9, 0.05]), (0.0, [0.5, 0.2]), (0.3, [0.3 * 0.9 + 0.35, 0.3 * 0.05 + 0.14])],
)
def test_stored_probabilities_count_as_far_as_they_are_trusted(trust, scores):
    tokens, found = unispec(trust=trust).scored(([2, 3], [0.9, 0.05]), trust)
    assert tokens == [2, 3] and found == pytest.approx(scores)


def test_trust_is_what_part_of_stored_probabilities_came_true():
    """Over a whole answer: of each draft's root the stored successors, and the token that came."""
    trusts, expected = [], []

    def watch(session):
        drafted, claimed, right = session.attached.drafted, [10.0], [3.0]

        def noted(request, state, budget):
            if expected:
                place, (successors, probabilities) = session.before
                claimed.append(sum(probabilities))
                right.append(request.tokens[place] in successors)
            expected.append(min(1, sum(right) / sum(claimed)))
            trusts.append(state.trust)
            session.before = len(request.tokens), state.store.get(request.tokens[-1], ([], []))
            return drafted(request, state, budget)

        session.attached.drafted = noted

    target = tiny_target()
    found = answered(watched(unispec(trust="proven"), target, watch), target)
    assert found.ids == PlainDecoder(target, Sampling(), Limits(LENGTH)).generate(PROMPT).ids
    assert trusts == pytest.approx(expected) and len(set(trusts)) > 3


def test_dictionaries_hold_all_parts_of_a_candidate_or_whole_ones_alone():
    parts, whole = Dictionaries(4, 5, True), Dictionaries(4, 5, False)
    for stored in (parts, whole):
        stored.add_candidate([1, 2, 3, 4])
    assert list(parts.starting_with(1)) == [(2, 3, 4)]
    assert list(parts.starting_with(2)) == [(3, 4)]
    assert list(parts.starting_with(3)) == [(4,)] and 4 not in parts.continuations
    assert parts.backward == {(1, 2, 3): 4, (2, 3): 4, (3,): 4}
    assert list(whole.starting_with(2)) == [] and whole.backward == {(1, 2, 3): 4}
    parts.add_candidate([3, 4, 5, 6])
    assert parts.chain([9, 2, 3], 8) == [4]  # (2, 3) -> 4; nothing is known to follow 4 here ...
    parts.add_candidate([0, 3, 4, 7])
    assert parts.chain([9, 2, 3], 8) == [4, 7]  # ... and now 7 follows (3, 4)
    parts.add_candidate([1, 2, 1, 2])
    parts.add_candidate([2, 1, 2, 1])
    assert parts.chain([9, 1, 2], 8) == [1, 2] * 4  # no further, though it might go on for ever


def of_its_own(name: str) -> bool:
    """No setting of another one, which changes nothing in whose stores they are."""
    return "," not in name or "kept" in name


@pytest.mark.parametrize(("name",), sparing(zip(untrained([])), of_its_own))
def test_stores_are_forgotten_from_prompt_to_prompt_unless_they_are_kept(name):
    target = tiny_target()
    attached = untrained([[1, 2, 3], [4, 5, 6]])[name].attach(target)
    engine = Engine(target, attached, Sampling(), Limits(LENGTH), 14)
    forwards = [engine.generate(PROMPT).statistics.target_forwards for _ in range(2)]
    batch = engine.generate_batch([[1, 2], PROMPT, [7] * 5])
    if attached.keeps:
        assert forwards[1] < forwards[0]
        attached.forget()
        assert engine.generate(PROMPT).statistics.target_forwards == forwards[0]
    elif name not in RECORDS:
        assert len(set(forwards)) == 1
        assert batch[1].statistics.target_forwards == forwards[0]
    assert attached.keeps == ("kept" in name) and attached.memory() > 0


@pytest.mark.parametrize(
    ("name", "temperature"),
    sparing(
        product(untrained([]), (0.0, 0.8)),
        lambda name, temperature: not temperature and of_its_own(name),
    ),
)
def test_requests_that_join_and_leave_are_drafted_for_as_they_are_alone(name, temperature):
    """Each joins a step after the one before; the shortest answer leaves first."""
    target, sampling = tiny_target(), Sampling(temperature)
    prompts, lengths = [PROMPT, [1, 2], [7] * 5], [24, 6, 15]
    make = untrained([[1, 2, 3], [4, 5, 6]]).__getitem__
    alone = []
    for seed, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        limits = Limits(length)
        alone.append(Engine(target, make(name), sampling, limits, 14).generate(prompt, seed))
        assert alone[-1].ids == PlainDecoder(target, sampling, limits).generate(prompt, seed).ids
    engine = Engine(target, make(name), sampling, Limits(LENGTH), 14)
    requests = []
    for seed, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        requests.append(engine.request(prompt, seed, limits=Limits(length)))
        engine.start(requests[-1:])
        engine.step()
    while not all(request.finished for request in requests):
        engine.step()
    together = [request.generation() for request in requests]
    assert [each.ids for each in together] == [each.ids for each in alone]
    if "kept" not in name and name not in RECORDS:
        assert [each.accepted for each in together] == [each.accepted for each in alone]


@pytest.mark.parametrize(
    ("name",), sparing(zip(untrained([])), lambda name: name in ("unispec", "spectra", "rest"))
)
def test_engines_of_two_targets_share_a_drafter_and_nothing_else(name):
    """Of as many tokens, and of fewer: steps of both in turn."""
    for other in (tiny_target(seed=1), tiny_target(seed=1, vocab_size=20)):
        targets, drafter = [tiny_target(), other], untrained([[1, 2, 3], [4, 5, 6]])[name]
        engines = [Engine(each, drafter, Sampling(), Limits(LENGTH), 14) for each in targets]
        requests = [engine.request([3, 14, 15, 3, 14]) for engine in engines]
        for engine, request in zip(engines, requests, strict=True):
            engine.start([request])
        while not all(request.finished for request in requests):
            for engine in engines:
                engine.step()
        for target, request in zip(targets, requests, strict=True):
            drafter = untrained([[1, 2, 3], [4, 5, 6]])[name]
            alone = Engine(target, drafter, Sampling(), Limits(LENGTH), 14)
            expected = alone.generate([3, 14, 15, 3, 14])
            assert request.generation().ids == expected.ids
            if name == "auto":  # it chooses by the clock
                assert engines[0].attached.record is not engines[1].attached.record
            else:
                assert request.generation().accepted == expected.accepted


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: unispec(top_k=0), "drafter.top_k"),
        (lambda: unispec(threshold=1.0), "drafter.threshold"),
        (lambda: unispec(trust=1.5), "drafter.trust"),
        (lambda: unispec(ranks=[0.5]), "drafter.ranks: give top_k"),
        (lambda: unispec(ranks=[0.2, 0.5]), "drafter.ranks: none"),
        (lambda: lookahead(ngram=1), "drafter.ngram: must be a whole number, at least 2"),
        (lambda: spectra(candidates=0), "drafter.candidates: must be a whole number, at least 1"),
        (lambda: spectra(unseen_probability=1.5), "drafter.unseen_probability"),
        (lambda: spectra(order="both"), "drafter.order: must be one of backward_first, forward"),
        (lambda: spectra(chain=0), "drafter.chain: must be a whole number, at least 1"),
        (lambda: spectra(backward_share=0.0), "drafter.backward_share"),
        (lambda: Retrieval(Texts([]), COMPARED + 1, 1, 1), "drafter.retrieval.max_ngram: must be"),
        (lambda: PromptLookup(0, 1), "drafter.max_ngram"),
    ],
)
def test_settings_out_of_range_are_refused(make, field):
    assert field in refused(make)


def test_memory_counts_each_object_once():
    ngram = (1000, 2000)
    once, twice = bytes_of([{ngram: 5}]), bytes_of([{ngram: 5, (3000,): ngram}])
    assert 0 < once < twice < once + 400


@pytest.mark.parametrize(
    ("budget", "prompt"),
    sparing(
        [(1, PROMPT), (2, PROMPT), (3, PROMPT), (5, PROMPT), (14, [5]), (14, [VOCABULARY - 1] * 2)],
        lambda budget, prompt: budget not in (3, 5),
    ),
)
def test_budgets_that_leave_no_room_still_decode(budget, prompt):
    target = tiny_target()
    expected = PlainDecoder(target, Sampling(), Limits(8)).generate(prompt).ids
    for name, drafter in untrained([[1, 2, 3]]).items():
        engine = Engine(target, drafter, Sampling(), Limits(8), budget)
        assert engine.generate(prompt).ids == expected, name


@pytest.mark.parametrize("place", [-1, 4, 2**31 - 1])
def test_an_order_out_of_range_is_refused(tmp_path, place):
    SuffixStore.of_texts([[1, 2, 3]]).save(tmp_path)
    order = np.load(tmp_path / "order.npy")
    order[0] = place
    np.save(tmp_path / "order.npy", order)
    assert "out of range" in refused(lambda: SuffixStore.open(tmp_path))


def test_a_long_prompt_is_indexed_about_as_fast_as_dictionaries_can_be_filled():
    """32,768 tokens; each index against dictionaries of the places of all n-grams, best of 3."""
    chance = random.Random(0)
    text = [int(chance.paretovariate(0.6)) % 4000 for _ in range(2**15)]

    def filled() -> None:
        for size in range(1, 5):
            ngrams = zip(*(text[place:] for place in range(size)), strict=False)
            dict(zip(ngrams, range(len(text)), strict=False))

    def seconds(function) -> float:
        started = time.process_time()
        function()
        return time.process_time() - started

    indexes = {
        "last places": lambda: LastPlaces(4).extend(text),
        "followers": lambda: Followers(4).extend(text),
        "guesses": lambda: GuessPool(4, 4).read(text, 0),
        "dictionaries": lambda: Dictionaries(4, 4, True).read(text, 0),
        "suffixes": lambda: suffix_decoding.Texts().extend(text),
    }
    least = min(seconds(filled) for _ in range(3))
    found = {name: min(seconds(each) for _ in range(3)) / least for name, each in indexes.items()}
    assert all(ratio < 4 for ratio in found.values()), found


@pytest.mark.parametrize("temperature", [0.01, 1e-3, 1e-25])
def test_cold_requests_have_the_likeliest_successors_too(temperature):
    """All but the first have no probability in float32, and are in their order all the same."""
    attached = unispec().attach(tiny_target())
    logits = torch.randn(1, 4, VOCABULARY)
    verified = SimpleNamespace(requests=[SimpleNamespace(sampling=Sampling(temperature))])
    tokens, probabilities = attached._likeliest(verified, logits)
    assert torch.equal(tokens, logits.topk(tokens.shape[-1]).indices)
    assert probabilities.isfinite().all()


def test_an_often_repeated_ngram_is_looked_at_in_its_last_places():
    index, text = Followers(2), [1, 2] * 5 + [1, 3] * 2000
    index.extend(text)
    assert index.continuation([*text, 1], 1) == ([3], [pytest.approx(1024 / (1024 + 2 / 2**2))])


def test_auto_lets_answers_be_kept_by_who_keeps_them():
    """Whether it looks at their drafts in the step that ends an answer or not."""
    target, keeping = tiny_target(), SuffixDecoding(8, 2.0, 0.1, kept=10_000)
    drafter = Auto({"suffixes": keeping, "lookup": PromptLookup(2, 3)})
    attached = drafter.attached(target)
    engine = Engine(target, attached, Sampling(), Limits(9), 4)
    for seed in range(12):
        engine.generate([5, 6, 7 + seed])
    (kept,) = attached.parts["suffixes"].kept
    assert list(kept.tokens).count(-1) == 12


def test_a_length_rule_is_told_of_a_draft_once_it_is_known_how_much_was_right():
    """Whether the draft was verified or not: `auto` looks up drafts that it leaves out."""
    told = []

    class Noted(DraftLength):
        def start(self):
            return self

        def observe(self, drafted, accepted):
            told.append((drafted, accepted))

    target = tiny_target()
    attached = PromptLookup(3, 4, Noted()).attach(target)
    request = PlainDecoder(target, Sampling(), Limits(20)).request([1, 2, 3, 4, 5, 6, 1, 2])
    verified, state = SimpleNamespace(requests=[request]), attached.state(request, 8)

    def drafted(*decided):
        request.tokens += decided
        attached.learn(verified, [state], None)
        return attached.drafted(request, state, 8).tokens[1:]

    assert drafted() == [3, 4, 5, 6] and not told
    assert drafted(3) == [4, 5, 6, 1] and not told  # one was right, of the others nothing is known
    assert drafted(4, 9) == [] and told == [(4, 2), (4, 1)]
    assert drafted(1, 2) == [3, 4, 9, 1] and len(told) == 2
    drafted(3, 4, 9, 1, 7)
    assert told[2:] == [(4, 4)]
    request.tokens += [1, 2, 3, 4] * 3
    told.clear()
    drafted()
    for token in [1, 2, 3, 4] * 2:  # one at a time, and all is right
        drafted(token)
    assert len(told) > 3 and set(told) == {(4, 4)}
