"""Studies of trees, of two models and of a look at the future, on tiny models."""

import pytest
import torch
from studies import pruning
from studies.peeking import peek
from studies.pruning import trees
from studies.two_models import two_models
from tests.tiny import VOCABULARY, tiny_speculator, tiny_target

from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.prompts import Prompt
from slipstream.speculators.checkpoint import save_speculator

PROMPTS = [Prompt("w3 w5 w8 w13", "a"), Prompt("w1 w2", "b"), Prompt("w9 w4 w7", "a")]


@pytest.fixture
def folder(target, tmp_path):
    speculator = tiny_speculator(target, num_streams=3, copy_scores=True, transition_rank=2)
    save_speculator(tmp_path / "model", speculator, target, 64, "# A")
    return tmp_path / "model"


@pytest.mark.exhaustive
def test_the_tree_study_decodes_every_shape(target, folder, monkeypatch):
    monkeypatch.setattr(pruning, "LIMITS", Limits(16))
    rows = trees(
        target, PROMPTS, str(folder), "fused", gammas=[1, 3], top_ks=[1, 2], largest=10, keep=0.9,
        calibration_prompts=1, repeats=1,
    ).rows  # fmt: skip
    whole = [(1, 1, 2), (1, 2, 3), (3, 1, 4), (3, 2, 10)]
    assert [(row["trees"], row["k"], row["nodes"]) for row in rows] == [
        (f"gamma {gamma}{pruned}", k, nodes)
        for gamma, k, nodes in whole
        for pruned in ("", ", pruned")
    ]
    assert all(row["tau"] >= 1 and row["speedup_vs_plain"] > 0 and row["details"] for row in rows)
    assert all((row["vs unpruned, 95 %"] is None) != ("pruned" in row["trees"]) for row in rows)


@pytest.mark.exhaustive
def test_two_models_count_the_draft_models_calls(target):
    small = tiny_target("llama", seed=5, num_hidden_layers=1)
    small.tokenizer = target.tokenizer
    draft = DraftModel(small, 4)
    streaming = Streaming(tiny_speculator(target), "deferred", top_k=2)
    calls = []
    small.family.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    found = two_models(target, PROMPTS, draft, streaming, budget=5, repeats=1)
    rows = {(row["prompts"], row["method"]): row for row in found.rows}
    assert {prompts for prompts, _ in rows} == {"a", "b", "all"}
    for prompts in ("a", "b", "all"):
        row = rows[prompts, "two models"]
        assert 1 < row["draft calls"] <= 4 * row["target calls"]
        assert rows[prompts, "streams"]["draft calls"] == 0
        assert rows[prompts, "streams"]["over two models, Eq. 10"] > 0
    total = 2 * rows["a", "two models"]["draft calls"] + rows["b", "two models"]["draft calls"]
    assert 3 * rows["all", "two models"]["draft calls"] == pytest.approx(total)
    # once for each prompt; a warm-up of the first prompt came twice before
    engine = Engine(target, DraftModel(small, 4), Sampling(), Limits(96), 5)
    before = len(calls)
    for prompt in PROMPTS:
        engine.generate(render_prompt(target.tokenizer, prompt.text))
    assert total == len(calls) - before


IDS = torch.tensor([[3, 17, 5, 29, 11, 8]])


def test_a_row_without_a_future_is_the_row_of_the_context(target):
    everywhere = torch.arange(6)[None]
    plain = target.forward(IDS, everywhere, None, None).hidden
    found = peek(target, IDS, everywhere, torch.empty(1, 6, 0, dtype=torch.long))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-10)


def test_a_peeking_row_sees_its_past_and_its_future_and_not_what_it_predicts(target):
    positions, futures = torch.tensor([[2, 3]]), torch.tensor([[[29 + 1, 11], [8, -1]]])
    found = peek(target, IDS, positions, futures)

    def changed(ids, futures) -> list[bool]:
        other = peek(target, ids, positions, futures)
        return [(other - found)[0, row].abs().max() > 1e-9 for row in range(2)]

    for place, expected in ((2, [True, True]), (3, [False, True]), (4, [False, False])):
        ids = IDS.clone()
        ids[0, place] = (ids[0, place] + 1) % VOCABULARY
        assert changed(ids, futures) == expected
    for token, expected in (
        ((0, 0), [True, False]),
        ((0, 1), [True, False]),
        ((1, 0), [False, True]),
    ):
        other = futures.clone()
        other[0][token] += 1
        assert changed(IDS, other) == expected
    other = futures.clone()
    other[0, 1, 1] = -7
    assert changed(IDS, other) == [False, False]


def test_a_peeking_row_equals_its_own_sequence_and_mask(target):
    """Row 2 predicts position 3 and sees tokens of positions 4 and 5 beside positions 0 to 2."""
    ids, places = torch.tensor([[3, 17, 5, 30, 11]]), torch.tensor([[0, 1, 2, 4, 5]])
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    context = mask.clone()
    # A second row of position 2, last, sees positions 0 and 1, itself and both future tokens.
    mask = torch.zeros(6, 6, dtype=torch.bool)
    mask[:5, :5] = context
    mask[5, [0, 1, 3, 4, 5]] = True
    hidden = target.forward(
        torch.cat([ids, ids[:, 2:3]], 1), torch.cat([places, places[:, 2:3]], 1), mask[None, None],
        None,
    ).hidden  # fmt: skip
    found = peek(target, ids[:, :3], torch.tensor([[2]]), torch.tensor([[[30, 11]]]))
    torch.testing.assert_close(found[0, 0], hidden[0, 5], rtol=0, atol=1e-10)
