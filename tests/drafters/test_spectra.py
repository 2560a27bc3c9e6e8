"""How SPECTRA's two dictionaries share the nodes that there are for guesses."""

import random
from collections import Counter

import pytest
import torch
from tests.commands import config_of
from tests.drafters.untrained import spectra
from tests.reference import DraftTree

from slipstream.configuration import build
from slipstream.core.drafts import Draft, PathTree
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.spectra import Dictionaries
from slipstream.targets.loading import load_target

NAMES = ("forward", "backward")


@pytest.mark.parametrize(
    ("changes", "room", "branches"),
    [
        (dict(backward_share=0.75), 8, [[4, 5, 2, 3, 4, 5], [8, 7]]),
        (dict(backward_share=0.5), 8, [[4, 5, 2, 3], [8, 7]]),
        (dict(backward_share=1.0), 8, [[4, 5, 2, 3, 4, 5, 2, 3]]),
        (dict(backward_share=0.1), 2, [[4], [8]]),
        (dict(order="forward_first", chain=4, backward_share=1.0), 8, [[8, 7], [4, 5, 2, 3]]),
        (dict(order="forward_first", chain=4, backward_share=1.0), 3, [[8, 7], [4]]),
    ],
)
def test_the_backward_dictionary_leaves_room_for_the_forward_one(changes, room, branches):
    """After 2 3 the backward dictionary knows 4 5 2 3 4 ..., and the forward one 8 7 after 3."""
    drafter, stored = spectra(**(dict(ngram=4, chain=8) | changes)), Dictionaries(4, 5, True)
    for ngram in ([2, 3, 4, 5], [3, 4, 5, 2], [4, 5, 2, 3], [5, 2, 3, 4], [9, 3, 8, 7]):
        stored.add_candidate(ngram)
    paths = PathTree(3, 1 + room)
    for guess in drafter.found([2, 3], stored, room):
        paths.add(guess)
    tree = DraftTree(paths.draft.tokens, paths.draft.parents)
    leaves = sorted(set(range(len(tree))) - set(tree.parents))
    assert [[tree.tokens[node] for node in tree.path(leaf)[1:]] for leaf in leaves] == branches


def test_a_candidate_is_extended_by_the_likeliest_token_that_is_no_key_however_unlikely():
    """Tokens 0 to 39 are keys of the forward dictionary and likelier than 40 (Algorithm 1)."""
    drafter, stored = spectra(unseen_probability=1.0), Dictionaries(3, 3, True)
    for key in range(40):
        stored.add([key, 99])
    candidates = drafter.branches([7], 9, stored)
    logits = torch.arange(100.0).neg().expand(1, len(candidates.sequences), 100).clone()
    said = drafter.said(logits, [candidates])
    assert said.tolist() == [[[0, 40]] * len(candidates.sequences)]
    candidates.extend(said[0].tolist())
    assert [sequence[-1] for sequence in candidates.sequences] == [40] * len(candidates.sequences)


def test_where_every_token_is_a_key_a_candidate_is_extended_by_the_likeliest():
    drafter, stored = spectra(unseen_probability=1.0), Dictionaries(3, 3, True)
    for key in range(5):
        stored.add([key, 1])
    candidates = drafter.branches([4], 9, stored)
    logits = torch.tensor([0.0, 1, 5, 3, 2]).expand(1, len(candidates.sequences), 5).clone()
    candidates.extend(drafter.said(logits, [candidates])[0].tolist())
    assert {sequence[-1] for sequence in candidates.sequences} == {2}


@pytest.mark.parametrize("sub_ngrams", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_text_read_at_once_is_stored_like_its_ngrams_one_by_one(seed, sub_ngrams):
    chance = random.Random(seed)
    text = [chance.randrange(5) for _ in range(60)]
    at_once, reference, forward = (Dictionaries(4, 3, sub_ngrams) for _ in range(3))
    for candidate in ([1, 2, 3, 4], [2, 2, 0, 1]):  # what candidates brought before
        for stored in (at_once, reference, forward):
            stored.add_candidate(candidate)
    for start, stop in ((0, 40), (37, 42), (39, 42), (39, 60)):
        at_once.read(text[:stop], start)
        for place in range(start, stop - 3):
            reference.add_candidate(text[place : place + 4])
            forward.add(text[place : place + 4])
        assert at_once.backward == reference.backward
        for token in range(5):
            assert list(at_once.starting_with(token)) == list(forward.starting_with(token))


def test_the_backward_dictionary_forgets_its_older_half_when_it_is_full(monkeypatch):
    monkeypatch.setattr("slipstream.drafters.spectra.KEPT", 100)
    stored = Dictionaries(2, 3, True)
    for first in range(1000):
        stored.add_candidate([first, 1])
        assert len(stored.backward) <= 100
    stored.read(list(range(500)), 0)
    assert (498,) in stored.backward and len(stored.backward) <= 550


def test_both_dictionaries_add_nodes_at_the_default_settings():
    """On generated prompts: nearly always where one knows what the other does not."""
    config = config_of("infer", "drafter=spectra")
    target = load_target("slipstream/small-target", device="cpu", packed=False)
    drafter, known, added = build(config.drafter), Counter(), Counter()

    attached = drafter.attach(target)
    drafted = attached.drafted

    def noted(*arguments):
        trees = []
        for drafter.forward, drafter.backward in ((True, False), (False, True), (True, True)):
            draft = drafted(*arguments)
            trees.append(paths_of(draft))
        for name, own, other in zip(NAMES, trees, trees[1::-1], strict=False):
            known[name] += bool(own - other)
            added[name] += bool(own - other) and bool(trees[2] - other)
        return draft

    attached.drafted = noted
    engine = Engine(target, attached, Sampling(), Limits(48), config.budget)
    for prompt in build(config.data).take(4):
        engine.generate(render_prompt(target.tokenizer, prompt.text))
    for name in NAMES:
        assert known[name] > 10 and added[name] >= 0.9 * known[name], (known, added)


def paths_of(draft: Draft) -> set[tuple[int, ...]]:
    tree = DraftTree(draft.tokens, draft.parents)
    return {tuple(tree.tokens[each] for each in tree.path(node)) for node in range(len(tree))}
