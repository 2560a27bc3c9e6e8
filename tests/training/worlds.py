"""A tiny target and rows of random words to train on, in a folder."""

import json
from pathlib import Path

import torch
from tests.commands import config_of
from tests.tiny import save_tiny_target, tiny_target, tiny_tokenizer

from slipstream import app

MODES = {
    "lossless": [],
    "skipping": ["speculator.mlp=adapter", "speculator.initialisation_rank=2"],
    "pairs": [
        "speculator.root_rank=4", "speculator.transition_rank=4", "speculator.copy_scores=true",
    ],
    "shared": ["speculator=streaming_shared"],
}  # fmt: skip


def make_world(folder: Path, num_rows: int = 24) -> Path:
    """target: float32; bfloat16: the same, saved in bfloat16; draft: a smaller one; rows."""
    generator = torch.Generator().manual_seed(0)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "w3"
    save_tiny_target(folder / "target", 0, tokenizer)
    save_tiny_target(folder / "draft", 1, tokenizer, num_hidden_layers=2)
    tiny_target("llama", 0).model.bfloat16().save_pretrained(folder / "bfloat16")
    tokenizer.save_pretrained(folder / "bfloat16")

    def words(count: int) -> str:
        return " ".join(
            f"w{n}" for n in torch.randint(4, 40, (count,), generator=generator).tolist()
        )

    (folder / "rows").mkdir()
    for split in ("train", "validation"):
        rows = [{"prompt": words(5), "completion": words(7)} for _ in range(num_rows)]
        (folder / "rows" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def overrides_of(world: Path, output: Path) -> list[str]:
    """Eight batches an epoch, a validation after every second one."""
    return [
        f"target.name={world}/target", f"data.path={world}/rows", "data.regenerate=false",
        "data.batch_tokens=64", "data.max_new_tokens=8", "training.learning_rate=0.01",
        "training.warmup_steps=0", "trainer.precision=32-true", "trainer.max_epochs=2",
        "trainer.val_check_interval=2", "trainer.log_every_n_steps=1", "logger=csv",
        f"output_dir={output}",
    ]  # fmt: skip


STREAMS = (
    "training.validation_prompts=2", "speculator.num_streams=2", "speculator.num_msa_layers=2",
)  # fmt: skip


def train(world: Path, output: Path, *overrides: str) -> Path:
    """Train a streaming speculator through train.py's call."""
    return app.train(config_of("train", *overrides_of(world, output), *STREAMS, *overrides))


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()
