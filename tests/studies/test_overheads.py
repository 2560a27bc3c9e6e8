"""Overheads as PyTorch counts them, against numbers by hand and the paper's; Eq. 10."""

import json

import pytest
import torch
from omegaconf import OmegaConf
from studies.overheads import draft_model, meta_target, overheads
from studies.two_models import speed_over_two_models, two_models
from tests.commands import config_of
from tests.tiny import tiny_target

from slipstream.core.errors import InputError
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.streaming import Streaming
from slipstream.results.record import environment
from slipstream.results.writer import write

SETTINGS = OmegaConf.to_container(config_of("infer", "study=overheads").study)
SETTINGS.pop("_target_")
GAMMA, ATTENDED, NODES, DRAFTED = 4, 64, 32, 121
TARGETS = {each["name"]: each for each in SETTINGS["targets"]}
DRAFTS = {each["name"]: each for each in SETTINGS["drafts"]}
LLAMA_7B = "Llama-2-7B, Vicuna-7B"
PARAMETERS, FLOPS, PRUNING = (
    "extra parameters", "GFLOPs per draft", "GFLOPs of the pruning head",
)  # fmt: skip


@pytest.fixture(scope="module")
def result():
    return overheads(None, [], **SETTINGS)


@pytest.fixture(scope="module")
def found(result) -> dict[tuple[str, str], dict]:
    return {(row["target"], row["method"]): row for row in result.rows}


def test_every_method_on_every_target_but_pairs_that_the_paper_does_not_name(found):
    assert {name for name, _ in found} == set(TARGETS) and len(found) == 6 * len(TARGETS)
    for (name, method), row in found.items():
        known = method != "two models" or name not in ("Phi-3-mini", "Mistral-7B")
        assert (row[PARAMETERS] is not None) == (row[FLOPS] is not None) == known
        assert (row[PRUNING] is not None) == method.startswith("streaming")
    for target in TARGETS.values():
        if target["draft"] is not None:
            pair = meta_target(target), meta_target(DRAFTS[target["draft"]])
            assert pair[0].vocab_size == pair[1].vocab_size


def test_streams_of_llama_by_hand(found):
    """Width 4096, MLP 11008, 32000 tokens, 4 layers of MSA, adapters and head of rank 8."""
    width, mlp, head = 4096, 11008, 4096 * 32000
    attention = 4 * width**2 + 2 * ATTENDED * width  # weights; scores and sum of values
    adapters = 8 * (8 * width + 2 * width)  # of the attention's linears, and in place of the MLP
    shared, fused, deferred = (
        found[LLAMA_7B, f"streaming, {each}"] for each in ("shared", "fused", "deferred")
    )
    own = GAMMA * width + 2 * 8 * width  # stream embeddings, and the pruning head
    assert shared[PARAMETERS] == own == 81_920
    assert fused[PARAMETERS] == deferred[PARAMETERS] == own + 4 * adapters
    row = 4 * (attention + adapters)
    assert deferred[FLOPS] * 1e9 == pytest.approx(2 * GAMMA * (row + head), rel=1e-12)
    assert fused[FLOPS] * 1e9 == pytest.approx(2 * GAMMA * (NODES * row + head), rel=1e-12)
    row = 4 * (attention + 3 * width * mlp)
    assert shared[FLOPS] * 1e9 == pytest.approx(2 * GAMMA * (NODES * row + head), rel=1e-12)
    pruning = 2 * DRAFTED * (head + 2 * 8 * width)
    for each in (shared, fused, deferred):
        assert each[PRUNING] * 1e9 == pytest.approx(pruning)


def test_streams_of_opt_run_through_its_mlp_with_adapters_beside_it(found):
    width, head = 2048, 2048 * 50272
    adapters = 8 * (8 * width + 2 * 5 * width)
    row = 4 * (12 * width**2 + 2 * ATTENDED * width + adapters)
    deferred = found["OPT-1.3B", "streaming, deferred"]
    assert deferred[FLOPS] * 1e9 == pytest.approx(2 * GAMMA * (row + head), rel=1e-12)
    assert deferred[PARAMETERS] == (GAMMA + 16) * width + 4 * adapters
    assert found["OPT-1.3B", "streaming, shared"][PARAMETERS] == 40_960


def test_medusa_and_eagle_by_hand(found):
    """Mistral, whose keys are narrower than its states."""
    width, mlp, keys, head = 4096, 14336, 1024, 4096 * 32000
    medusa, eagle = found["Mistral-7B", "Medusa"], found["Mistral-7B", "EAGLE"]
    assert medusa[PARAMETERS] == GAMMA * (width**2 + head)
    assert medusa[FLOPS] * 1e9 == pytest.approx(2 * medusa[PARAMETERS])
    assert eagle[PARAMETERS] == 2 * width**2 + 2 * width * (width + keys) + 3 * width * mlp
    token = eagle[PARAMETERS] + 2 * ATTENDED * width + head
    assert eagle[FLOPS] * 1e9 == pytest.approx(2 * GAMMA * token)


@pytest.mark.parametrize(
    ("name", "parameters", "tables"),
    [("llama-68m", 68_030_208, 32000 * 768), ("opt-125m", 125_239_296, 2050 * 768)],
)
def test_draft_models(found, name, parameters, tables):
    """The published models' numbers of parameters; biases and norms are under 0.1 %. Tables are
    looked up and never multiplied: Llama's embeddings, OPT's positions."""
    model = meta_target(DRAFTS[name])
    assert sum(parameter.numel() for parameter in model.model.parameters()) == parameters
    weights, flops = draft_model(model, GAMMA, ATTENDED)
    assert weights == pytest.approx(parameters, rel=1e-3)
    attention = model.num_layers * 2 * ATTENDED * 768
    assert flops == 2 * GAMMA * (weights - tables + attention)
    for target in TARGETS.values():
        if target["draft"] == name:
            row = found[target["name"], "two models"]
            assert (row[PARAMETERS], row[FLOPS]) == (weights, flops / 1e9)


@pytest.mark.parametrize(
    ("name", "streams", "medusa", "eagle"),
    [("Phi-3-mini", 61_440, "4.3E+08", "1.3E+08"), (LLAMA_7B, 81_920, "5.9E+08", "2.4E+08")],
)
def test_parameters_of_table_3(found, name, streams, medusa, eagle):
    """For EAGLE on Mistral, whose MLP is wider, the paper prints Llama's number."""
    assert found[name, "streaming, shared"][PARAMETERS] == streams
    assert f"{found[name, 'Medusa'][PARAMETERS]:.1E}" == medusa
    assert f"{found[name, 'EAGLE'][PARAMETERS]:.1E}" == eagle


def test_numbers_of_the_notes(found):
    fused = found[LLAMA_7B, "streaming, fused"]
    assert fused[FLOPS] == pytest.approx(70.6, abs=0.1)
    assert fused[PRUNING] * 32 / DRAFTED == pytest.approx(8.4, abs=0.1)


def test_eq_10_on_the_papers_example():
    """Appendix N: with gamma 4, C_target / C_draft = 10 and C_ss = C_target, parity is at
    zeta = 1.4 beta."""
    assert speed_over_two_models(4, 1, 10, 10, zeta=1.4, beta=1) == pytest.approx(1)
    # by hand: (3 * 2 + 12) / 3 = 6 ms a token against 10 / 2.5 = 4 ms
    assert speed_over_two_models(3, 2, 12, 10, zeta=3, beta=2.5) == pytest.approx(1.5)


def test_a_budget_below_the_draft_models_chain_is_refused():
    draft = DraftModel(meta_target(DRAFTS["llama-68m"]), 4)
    streaming = Streaming("anywhere", "deferred", top_k=2)
    with pytest.raises(InputError, match=r"study\.budget: 4 nodes.* give at least 5"):
        two_models(tiny_target(), [], draft, streaming, budget=4, repeats=1)


def test_the_study_is_written_as_record_table_and_picture(result, tmp_path):
    write(tmp_path, result, {"a": 1}, environment(tiny_target()))
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["results"] == result.rows and content["config"] == {"a": 1}
    assert content["environment"]["versions"]["torch"] == torch.__version__
    assert content["environment"]["dtype"] == "float64"
    assert "| Vicuna-33B | Medusa | 1,029,177,344 |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "plot.png").stat().st_size > 10_000
