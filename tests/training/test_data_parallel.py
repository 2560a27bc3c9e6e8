"""Two processes on this machine train what one does with the same batches."""

import pytest
import safetensors.torch
import torch
from tests.commands import script

ROWS = [
    '{"prompt": "name[Blue Spice], food[Thai]", "completion": "Blue Spice serves Thai food."}',
    '{"prompt": "name[Alimentum]", "completion": "Alimentum is a place to eat at, by the river."}',
    '{"prompt": "name[Zizzi], area[city centre]", "completion": "Zizzi is in the city centre."}',
]


def train(folder, output, *overrides) -> dict[str, torch.Tensor]:
    """The trained tensors of three steps in float64: AdamW enlarges what rounding leaves open."""
    given = [
        f"data.path={folder}", "data=jsonl",
        "data.regenerate=false", "trainer.max_steps=3", "trainer.precision=64-true",
        "trainer.accelerator=cpu", "trainer.val_check_interval=null",
        "trainer.check_val_every_n_epoch=1000", "training.learning_rate=1e-3",
        "speculator=streaming_paper",
        "speculator.copy_scores=true", "speculator.root_rank=8", "speculator.root_dropout=0.5",
        "logger=csv", "seed=3", f"output_dir={output}", *overrides,
    ]  # fmt: skip
    run = script("train.py", *given)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("saved to") == 1
    return safetensors.torch.load_file(output / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder of rows, and what one process learns of them."""
    tmp_path = tmp_path_factory.mktemp("world")
    rows = [ROWS[number % 3].replace("]", f" {number}]", 1) for number in range(22)]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path, train(tmp_path, tmp_path / "one", "data.batch_tokens=512")


@pytest.mark.parametrize(
    "way",
    ["trainer.strategy=ddp", "trainer=sharded", "trainer=sharded training.num_segments=7"],
)
@pytest.mark.exhaustive
def test_two_processes_equal_one_with_the_same_batches(world, way):
    """Each with the whole target, or each with half of it, whose layers all must run equally often;
    with a validation in between."""
    folder, one = world
    two = train(
        folder, folder / way.rpartition("=")[2], *way.split(), "trainer.devices=2",
        "data.batch_tokens=256",
        "target.device=cpu", "trainer.check_val_every_n_epoch=1", "trainer.val_check_interval=2",
        "training.validation_prompts=1", "callbacks.best=null",
    )  # fmt: skip
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-10)
