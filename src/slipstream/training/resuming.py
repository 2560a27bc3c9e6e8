"""Which state a training goes on from, and whether it is one of the same run."""

import json
from contextlib import suppress
from itertools import chain
from pathlib import Path

import lightning as L
import torch

from slipstream.core.errors import InputError
from slipstream.core.files import SUMS, key_of, load_tensors, write_json
from slipstream.core.resuming import check_same, flattened

FREE = (
    "data.cache_dir", "data.path", "data.regeneration.concurrency", "data.regeneration.endpoint",
    "data.regeneration.key_variable", "data.regeneration.memory_gib", "data.regeneration.model",
    "trainer.accelerator", "trainer.default_root_dir", "trainer.devices", "trainer.enable_",
    "trainer.log_every_n_steps", "trainer.max_", "trainer.num_nodes", "trainer.plugins",
    "trainer.strategy", "training.cache_dir", "training.draft.device", "training.draft.packed",
)  # fmt: skip
"""Beginnings of settings in which a run may differ from the one it goes on with."""
STATE = {
    "global_step": int, "pytorch-lightning_version": str, "state_dict": dict, "loops": dict,
    "callbacks": dict, "optimizer_states": list, "lr_schedulers": list,
}  # fmt: skip
"""What Lightning goes on from."""
UNTIL = "max_epochs", "max_steps", "max_time"


def identity(module: L.LightningModule, config: dict) -> dict[str, object]:
    """What decides about the weights of a run: the kind of speculator, target, settings; its data
    are still to come."""
    trained = getattr(module, "verifier", getattr(module, "speculator", None))
    target = getattr(module, "target", None)
    parts = {name: config.get(name) for name in ("speculator", "training", "trainer", "seed")}
    settings = flattened(parts | {"data": config["data"]})
    settings = {name: value for name, value in settings.items() if not name.startswith(FREE)}
    found = {
        "speculator.kind": getattr(trained, "kind", None),
        "target": None if target is None else [target.fingerprint, str(target.dtype)],
    }
    return json.loads(json.dumps(found | settings))


def data_of(module: L.LightningModule) -> dict[str, object]:
    """What it is trained on, as part of what a run is; drafts: of classifiers, what these are told
    of them."""
    samples = [[each.ids, each.supervised] for each in chain(*module.data.samples.values())]
    found = f"{len(samples)} samples {key_of(samples)}"
    return {"data": found, "drafts": getattr(module, "drafts", None)}


def check_settings(state: Path | None, run: dict[str, object]) -> None:
    """`InputError` for the checkpoint of a run with other settings, before its data are known."""
    if state is None:
        return
    then = torch.load(state, map_location="cpu", mmap=True, weights_only=True).get("run")
    if isinstance(then, dict):
        known = {name: value for name, value in then.items() if name not in ("data", "drafts")}
        check_same(known, run)


def state_of(resume: str | None, output: Path) -> Path | None:
    """The checkpoint to go on from; with 'auto' the one of most steps that is whole, if any.

    Raises `InputError` for a file that is missing or damaged.
    """
    if resume is None:
        return None
    if resume != "auto":
        if not Path(resume).is_file():
            raise InputError(
                f"resume: {resume} is no file; give auto, or a .ckpt file of an earlier run"
            )
        _steps(Path(resume))
        return Path(resume)
    # beside ours those that Lightning writes where SLURM asks for a job's place
    found: list[tuple[int, float, Path]] = []
    for path in (*output.glob("checkpoints/*.ckpt"), *output.glob("hpc_ckpt_*.ckpt")):
        try:
            found.append((_steps(path), path.stat().st_mtime, path))
        except InputError as error:
            print(f"note: {error}")
    return max(found, default=(0, 0.0, None))[2]


def _steps(path: Path) -> int:
    """How many steps a checkpoint has; `InputError` where it lacks what Lightning needs."""
    try:
        state = load_tensors(path)
        for name, kind in STATE.items():
            if not isinstance(state, dict) or not isinstance(state.get(name), kind):
                raise ValueError(f"without {name}")
        steps = state["global_step"]
        if isinstance(steps, bool) or steps < 0:
            raise ValueError(f"of {steps} steps")
        return steps
    except (OSError, ValueError) as error:
        raise InputError(
            f"resume: {path} is no whole checkpoint ({error}); give auto, or another .ckpt file"
        ) from error


def kept_in(folder: Path, state: dict) -> None:
    """Let the `state` of a `ModelCheckpoint` say of what it kept where that is now: in `folder`, if
    the run's folder was moved. What is missing or damaged is forgotten, so that the best of the
    steps to come is kept."""

    def found(known: str) -> str:
        for path in (folder / Path(known).name, Path(known)) if known else ():
            with suppress(InputError):
                _steps(path)
                return str(path)
        return ""

    kept = {path: found(path) for path in state["best_k_models"]}
    state["best_k_models"] = {kept[path]: own for path, own in state["best_k_models"].items()}
    state["best_k_models"].pop("", None)
    for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
        state[name] = found(state[name])
    state["dirpath"] = str(folder)
    if not state["best_model_path"]:
        state["best_model_score"] = None


class Finished:
    """The note of a run that has ended; it stands beside its checkpoints."""

    def __init__(self, output: Path, run: dict[str, object], trainer_settings: dict):
        self.path = output / "checkpoints" / "finished.json"
        until = {name: trainer_settings.get(name) for name in UNTIL}
        self.run, self.until = run, json.loads(json.dumps(until))

    def says_so(self) -> bool:
        """Whether this run has ended before, with as many steps; `InputError` for another run."""
        try:
            known = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return False
        if not isinstance(known, dict) or not isinstance(known.get("run"), dict):
            return False
        check_same(known["run"], self.run)
        there = (self.path.parents[1] / "model" / SUMS).is_file()
        return there and known.get("until") == self.until

    def note(self) -> None:
        write_json(self.path, {"run": self.run, "until": self.until})
