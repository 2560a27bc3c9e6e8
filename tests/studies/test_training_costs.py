"""Studies of training: memory metering, and segments against the dense reference."""

import pytest
import torch
from studies.training_costs import PeakMemory, gradients, memory, pair_scores, segments
from tests.exhaustive import sparing
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core.errors import InputError
from slipstream.evaluation.prompts import Prompt
from slipstream.speculators.checkpoint import save_speculator
from slipstream.speculators.streaming.config import StreamingConfig


def test_peak_memory_counts_what_is_made_and_forgets_what_is_freed():
    before = torch.randn(100, 100, requires_grad=True)
    with PeakMemory() as memory:
        made = torch.zeros(1000, 100)
        assert memory.live == 400_000
        view = made[:500]
        assert memory.live == 400_000
        product = made @ before
        assert memory.live == 800_000
        del product, view
        assert memory.live == 400_000
        before.t()
        assert memory.live == 400_000
    assert memory.peak == 800_000


def test_peak_memory_sees_saved_activations_and_gradients():
    weight = torch.randn(100, 100, requires_grad=True)
    rows = torch.randn(1000, 100)
    with PeakMemory() as memory:
        loss = (rows @ weight).relu().square().sum()
        saved = memory.live
        loss.backward()
    assert saved >= 400_000
    assert memory.peak >= saved + 400_000


@pytest.mark.parametrize(
    ("mode",), sparing([("lossless",), ("shared",)], lambda mode: mode == "lossless")
)
def test_the_segment_study_measures_every_kind(mode):
    target = tiny_target()
    target.model.float()
    config = tiny_speculator(target, mode=mode).config
    rows = segments(target, [], config, lengths=[16, 64], segments=[1, 4], repeats=1).rows
    assert [(row["tokens"], row["segments"]) for row in rows] == [
        (length, kind) for length in (16, 64) for kind in ("dense", "1", "4")
    ]
    peaks = {row["segments"]: row["peak MB"] for row in rows if row["tokens"] == 64}
    assert peaks["4"] < 0.6 * peaks["dense"]


@pytest.mark.exhaustive
def test_the_memory_study_estimates_what_a_process_takes():
    shape = {
        "model_type": "llama", "vocab_size": 8000, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 4,
    }  # fmt: skip
    small, sketched = ({"name": name, "measured": name == "run"} for name in ("run", "sketch"))
    models = [own | {"batch_size": 2, "length": 64} | shape for own in (small, sketched)]
    ran, only = memory(tiny_target(), [], StreamingConfig(), models, None).rows
    assert ran["tokens"] == 128 and only["measured GiB"] is None and ran.keys() == only.keys()
    parts = ran["weights GiB"] + ran["moments GiB"] + ran["step GiB"]
    assert ran["estimate GiB"] == only["estimate GiB"] == pytest.approx(parts) and parts > 0
    # A process also keeps what libraries allocate at first, which counts in a model so small.
    assert 0.1 < ran["estimate of measured"] < 1.5


def test_scores_of_pairs_are_timed_beside_none():
    rows = pair_scores(tiny_target(), [], 500, 64, 4, [16], 1).rows
    assert [row["pair scores"] for row in rows] == ["yes"] * 2 + ["no"] * 2
    for own, plain in zip(rows[:2], rows[2:], strict=True):
        assert own["vs without"] == own["seconds"] / plain["seconds"] and plain["vs without"] == 1


def test_a_speculator_for_a_study_is_checked():
    with pytest.raises(InputError, match="num_msa_layers"):
        segments(tiny_target(), [], StreamingConfig(num_msa_layers=9), [16], [1], 1)


def test_gradients_are_measured_by_layer_and_before_and_after(target, tmp_path):
    target.model.float()
    speculator = tiny_speculator(target, mode="shared")
    save_speculator(tmp_path / "trained", speculator, target, 64, "# A")
    trained = {"at the end": str(tmp_path / "trained")}
    rows = gradients(target, [Prompt("w3 w5 w8", "a")], speculator.config, trained).rows
    assert [(row["when"], row["layer"]) for row in rows] == [
        (when, layer) for when in ("at the start", "at the end") for layer in range(4)
    ]
    assert all(row["main loss"] > 0 and row["streams' losses"] > 0 for row in rows)
