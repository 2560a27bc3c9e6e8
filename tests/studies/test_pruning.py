"""Calibration of pruning: what a threshold and a cap would have dropped, and the study of it."""

import pytest
from studies import pruning as pruning_study
from studies.pruning import (
    SeenTree,
    calibrate,
    kept_interval,
    outcome,
    pruning,
    record_trees,
    settings_of,
)
from tests.reference import DraftTree
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core.errors import InputError
from slipstream.core.trees import Trees
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.prompts import Prompt
from slipstream.targets.loading import load_target

TREE = DraftTree([7, 1, 2, 3], [-1, 0, 0, 1])


def test_a_root_alone_is_no_draft_that_survived():
    trees = [SeenTree(TREE, [1.0, 0.9, 0.1, 0.8], path) for path in ([0], [0], [0, 2])]
    found = outcome(trees, 0.5, 4)
    assert found["kept_paths"] == pytest.approx(2 / 3) and found["kept_drafts"] == 0


def test_outcome_counts_paths_and_nodes():
    trees = [
        SeenTree(TREE, [1.0, 0.9, 0.1, 0.8], [0, 1, 3]),
        SeenTree(TREE, [1.0, 0.2, 0.7, 0.8], [0, 1]),
    ]
    found = outcome(trees, 0.5, 4)
    assert (found["kept_paths"], found["kept_drafts"], found["pruned"]) == (0.5, 0.5, 1 - 5 / 8)
    assert outcome(trees, 0.0, 4)["kept_paths"] == 1.0
    assert outcome(trees, 0.0, 1)["kept_paths"] == 0.0


def test_what_is_kept_has_an_interval_over_prompts():
    kept, dropped = ([0, 1, 3], [0, 2])
    seen = [
        SeenTree(TREE, [1.0, 0.9, 0.1, 0.8], path, prompt)
        for prompt, path in enumerate((kept, kept, dropped, [0]))
    ]
    found = kept_interval(seen, outcome(seen, 0.5, 4))
    assert found["low"] == 0 and found["high"] == 1
    assert kept_interval(seen[:2], outcome(seen[:2], 0.5, 4)) == {"low": 1.0, "high": 1.0}


def test_calibration_prunes_most_among_what_keeps_enough():
    sure = [SeenTree(TREE, [1.0, 0.9, 0.1, 0.8], [0, 1, 3])] * 19
    odd = [SeenTree(TREE, [1.0, 0.9, 0.1, 0.8], [0, 2])]
    possible = settings_of(sure + odd)
    found = calibrate(possible, keep=0.95)
    assert (found["kept_paths"], found["pruned"]) == (0.95, 0.25)
    assert calibrate(possible, keep=1.0)["pruned"] == 0.0
    with pytest.raises(InputError, match="no trees were drafted"):
        settings_of([])


def test_recorded_trees_are_those_that_were_verified():
    target = tiny_target()
    drafter = Streaming(tiny_speculator(target, pruning_layer=3), "deferred", top_k=2)
    trees = record_trees(target, drafter, [[3, 5, 8], [1, 2]], budget=6)
    assert len(trees) >= 4
    for seen in trees:
        assert len(seen.tree) == len(seen.transitions) <= 6
        (ancestors,) = Trees.of([seen.tree]).ancestors
        assert seen.path == ancestors[seen.path[-1]].nonzero()[:, 0].tolist()
        assert all(0 <= value <= 1 for value in seen.transitions)


def test_the_study_tries_what_was_calibrated_on_other_prompts(target):
    drafter = Streaming(tiny_speculator(target, pruning_layer=3), "deferred", top_k=2)
    prompts = [Prompt(text, "a") for text in ("w3 w5 w8", "w1 w2", "w9 w4 w7")]
    rows = pruning(target, prompts, drafter, 6, calibration_prompts=1, keep=[0.5, 1.0]).rows
    parts = "calibrated on", "held out"
    assert [(row["asked for"], row["prompts"]) for row in rows] == [
        (keep, part) for keep in (0.5, 1.0) for part in parts
    ]
    assert rows[2]["kept_drafts"] == 1.0 and rows[0]["threshold"] == rows[1]["threshold"]


def test_more_streams_than_there_are_cannot_be_asked_for():
    target, path = load_target("slipstream/small-target"), "slipstream/small-streaming"
    with pytest.raises(InputError, match=r"study\.gammas: .* has 6 streams; ask for no more"):
        pruning_study.trees(target, [], path, "deferred", [3, 7], [2], 12, 0.95, 1, 1)
