"""What `tests/torture.py` ends: commands that are over in seconds, on tiny models."""

import json
import os
import resource
from pathlib import Path

import safetensors.torch  # noqa: F401
import torch
from tests.commands import config_of
from tests.training import worlds

import slipstream.training.run  # noqa: F401  imported before processes are forked
from slipstream import app, entry
from slipstream.core.files import load_tensors
from slipstream.training.speculator import SpeculatorTraining  # noqa: F401
from slipstream.training.verifier import VerifierTraining  # noqa: F401

COMMON = {
    "train": [
        "data.path={world}/rows", "data.regenerate=false", "data.batch_tokens=64",
        "data.max_new_tokens=8", "training.learning_rate=0.01", "logger=csv",
        "trainer.precision=32-true", "trainer.val_check_interval=2", "trainer.log_every_n_steps=1",
        "callbacks.summary=null",
    ],
    "infer": [
        "target.name={world}/target", "data.path={world}/rows/validation.jsonl",
        "limits.max_new_tokens=12", "drafter=unispec", "drafter.keep=true",
    ],
}  # fmt: skip
COUNTED = "method", "identical", "tokens", "tau", "target_forwards", "accepted_lengths", "ended"
DRAFTING = [
    "target.name={world}/target",
    "training.warmup_steps=0",
    "training.validation_prompts=1",
    "trainer.max_epochs=1",
]
CLASSIFYING = [
    "target.name={world}/target", "training.draft.name={world}/draft", "data.max_new_tokens=4",
    "trainer.max_epochs=3", "training.cache_dir={output}/labels",
    "training.batch_size=64", "training.learning_rate=0.05",
]  # fmt: skip
TRAINED = {
    "streaming": ["speculator.num_streams=2", "speculator.num_msa_layers=2", *DRAFTING],
    "medusa": ["speculator=medusa", "speculator.num_heads=2", *DRAFTING],
    # dropout draws random numbers at every step
    "shared": [
        "speculator=streaming_shared", "speculator.num_streams=2", "speculator.num_msa_layers=2",
        "speculator.lora.dropout=0.3", *DRAFTING,
    ],
    "sprinter": ["experiment=sprinter_small", *CLASSIFYING],
    "acceptance": ["experiment=acceptance_small", *CLASSIFYING],
    "fine_tuning": [
        "experiment=fine_tuning", "target.name={world}/target", "training.lora.dropout=0.3",
        "training.warmup_steps=0", "trainer.max_epochs=1",
    ],
    "language_model": [
        "experiment=small_target", "training.vocab_size=400", "training.warmup_steps=2",
        "training.architecture.hidden_size=32", "training.architecture.intermediate_size=48",
        "training.architecture.num_hidden_layers=2", "training.architecture.num_attention_heads=4",
        "trainer.max_steps=8",
    ],
    "regeneration": [
        "speculator=medusa", "speculator.num_heads=2", "data.regenerate=true",
        "data.cache_dir={output}/answers", *DRAFTING,
    ],
}  # fmt: skip
INFERRED = {
    "comparison": ["num_prompts=6", "repeats=2"],
    "calibration": [
        "calibrate=true", "calibration.budgets=[2,3,4]",
        "calibration.num_prompts=4", "calibration.folder={output}/calibrations",
    ],
}  # fmt: skip
KINDS = [*TRAINED, *INFERRED]


def make_world(folder: Path) -> Path:
    """As other tests have it, with a target whose answers are short."""
    worlds.make_world(folder)
    path = folder / "target" / "config.json"
    content = json.loads(path.read_text()) | {"max_position_embeddings": 32}
    path.write_text(json.dumps(content))
    return folder


def command(
    kind: str,
    world: Path,
    output: Path,
    log: Path,
    overrides: tuple[str, ...],
    most_bytes: int | None,
) -> None:
    """Run it, in a process of its own; what it says goes into the file `log`; most_bytes: of each
    file that it writes."""
    with log.open("wb") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    torch.set_num_threads(1)
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    call, name = (app.train, "train") if kind in TRAINED else (app.infer, "infer")
    own = [*COMMON[name], *(TRAINED | INFERRED)[kind], "output_dir={output}"]
    own = [each.format(world=world, output=output) for each in own]
    with entry.one_sentence():
        call(config_of(name, *own, *overrides))


def ended_with(kind: str, output: Path) -> object:
    """All that must be the same, whatever happened on the way."""
    if kind == "calibration":
        rows = json.loads((output / "results.json").read_text())["results"]
        return {(row["way"], row["nodes"]): row["tau"] for row in rows if row["nodes"] <= 4}
    if kind == "comparison":
        rows = json.loads((output / "results.json").read_text())["results"]
        return [{name: row[name] for name in COUNTED} for row in rows]
    files = [path for path in (output / "model").rglob("*") if path.name != "README.md"]
    files += output.glob("answers/*.jsonl")
    found = {str(path.relative_to(output)): path.read_bytes() for path in files if path.is_file()}
    found.pop("model/SHA256SUMS")  # of the card as well, which has the seconds
    parts = sorted(output.glob("labels/*/*.pt"))
    return found, [{n: t.tolist() for n, t in load_tensors(path).items()} for path in parts]
