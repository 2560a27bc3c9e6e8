"""The recipe of the shipped models, on a model and data small enough for a test."""

import json

import pytest
import safetensors.torch
from tests.commands import config_of

from slipstream import app
from slipstream.core.errors import InputError
from slipstream.data.synthetic import SyntheticPrompts
from slipstream.targets.loading import load_target


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A folder of rows whose answer is the start of their prompt."""
    folder = tmp_path_factory.mktemp("rows")
    for split in ("train", "validation"):
        prompts = SyntheticPrompts(["data_to_text"], 60, 0, split).rows()
        lines = [
            json.dumps({"prompt": row.prompt, "completion": row.prompt[:20]}) for row in prompts
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder


def train(experiment, rows, output, *overrides):
    return app.train(
        config_of(
            "train", f"experiment={experiment}", f"data.path={rows}", f"output_dir={output}",
            "logger=csv", "training.vocab_size=400", "training.warmup_steps=2",
            "training.architecture.hidden_size=32", "training.architecture.intermediate_size=48",
            "training.architecture.num_hidden_layers=2",
            "training.architecture.num_attention_heads=4", "trainer.max_steps=8",
            "trainer.val_check_interval=2", "data.batch_tokens=512", *overrides,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def first(rows, tmp_path_factory):
    return train("small_target", rows, tmp_path_factory.mktemp("first"))


def test_a_model_from_scratch_opens_as_a_target(first):
    target = load_target(str(first))
    assert target.num_layers == 2 and target.hidden_size == 32 and target.end_ids
    assert "validation loss" in (first / "README.md").read_text()


def test_a_second_stage_starts_from_the_weights_of_the_first(first, rows, tmp_path):
    options = (f"training.start_from={first}", "data.copying_rows=20")
    still = train("small_target_copying", rows, tmp_path / "still", *options,
                  "training.learning_rate=0.0")  # fmt: skip
    moved = train("small_target_copying", rows, tmp_path / "moved", *options)
    weights = [
        safetensors.torch.load_file(folder / "model.safetensors")
        for folder in (first, still, moved)
    ]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    assert any((weights[0][name] != weights[2][name]).any() for name in weights[0])
    assert (still / "tokenizer.json").read_text() == (first / "tokenizer.json").read_text()


def test_a_second_stage_needs_a_first(rows, tmp_path):
    with pytest.raises(InputError, match="cannot be opened"):
        train("small_target_copying", rows, tmp_path, f"training.start_from={tmp_path}/none")
