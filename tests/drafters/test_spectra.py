"""How SPECTRA's two dictionaries share the nodes that there are for guesses."""

from collections import Counter

import pytest
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
        stored.add(ngram)
    paths = PathTree(3, 1 + room)
    for guess in drafter.found([2, 3], stored, room):
        paths.add(guess)
    tree = DraftTree(paths.tokens, paths.parents)
    leaves = sorted(set(range(len(tree))) - set(tree.parents))
    assert [[tree.tokens[node] for node in tree.path(leaf)[1:]] for leaf in leaves] == branches


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
