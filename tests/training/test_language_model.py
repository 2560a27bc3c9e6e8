"""The recipe of the shipped models, on a model and data small enough for a test."""

import json

import pytest
import safetensors.torch
from tests.commands import config_of

from slipstream import app
from slipstream.configuration import build
from slipstream.core.errors import InputError
from slipstream.data.sources import Sources
from slipstream.targets.loading import load_target


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A folder of rows whose answer is the start of their prompt."""
    folder = tmp_path_factory.mktemp("rows")
    for split in ("train", "validation"):
        prompts = Sources(None, None, ["data_to_text"], 0).synthetic(60, split)
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


def test_a_draft_model_learns_what_its_teacher_says(first, rows, tmp_path):
    """The loss is the KL divergence from the teacher's distribution, over real rows and generated
    prompts that the teacher answers."""
    options = (
        f"training.tokenizer={first}", f"training.teacher.name={first}", "data.generated_rows=8",
        f"data.cache_dir={tmp_path}/answers", "data.max_new_tokens=8",
        "training.architecture.num_key_value_heads=4",
    )  # fmt: skip
    folder = train("small_draft", rows, tmp_path / "draft", *options)
    card = (folder / "README.md").read_text()
    assert "8 generated prompts (data_to_text and text_to_sql)" in card and "forward KL" in card
    config = config_of("train", "experiment=small_draft", f"data.path={rows}", *options)
    module, data = build(config.training), build(config.data)
    module.prepare(data)
    plain = build(config_of("train", "experiment=small_draft", f"data.path={rows}").data)
    assert len(data.samples["train"]) > len(plain.rows("train"))
    batch = next(iter(data.val_dataloader()))
    draft, teacher = module.model, module.teacher.model
    ours, theirs = (
        model(batch.ids).logits[:, :-1].log_softmax(-1)[batch.supervised[:, 1:]]
        for model in (draft, teacher)
    )
    divergence = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    assert module.losses(batch, None)[0].item() == pytest.approx(divergence.item(), rel=1e-4)
    assert divergence > 0.01
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert module.beside == sum(parameter.nbytes for parameter in teacher.parameters())


def test_a_teacher_of_another_vocabulary_is_refused(first, rows, tmp_path):
    with pytest.raises(InputError, match="another vocabulary than the model"):
        train(
            "small_draft", rows, tmp_path, f"training.teacher.name={first}",
            "training.architecture.num_key_value_heads=4",
        )  # fmt: skip


def test_generated_rows_need_a_target_that_answers(rows, tmp_path):
    with pytest.raises(InputError, match="need a target that answers"):
        train(
            "small_target", rows, tmp_path, "data.generated_rows=4",
            "data.synthetic_kinds=[data_to_text]",
        )  # fmt: skip
