"""A training run: build, resume, fit, keep the best state, write the folder and its card."""

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import torch
from hydra.utils import get_class
from lightning.pytorch.callbacks import GradientAccumulationScheduler, Timer, WeightAveraging
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torch.distributed import DistError

from slipstream.configuration import build, recorded
from slipstream.core.errors import InputError, enough_memory
from slipstream.core.resuming import BY_CTRL_C, TERMINATED
from slipstream.decoding.statistics import LOW_TAU
from slipstream.targets.packed import packing_available
from slipstream.training.callbacks import tell_run
from slipstream.training.card import card
from slipstream.training.module import epoch_batches
from slipstream.training.resuming import Finished, check_settings, data_of, identity, state_of
from slipstream.training.sharding import ShardedTarget
from slipstream.training.together import end_alone, launch
from slipstream.training.tracking import followed, log_once, tracked

ROOM = (
    "lower data.batch_tokens or data.max_length, raise training.num_segments, or set "
    "training.checkpointing=true"
)
say = rank_zero_only(print)
"""One process of several says what all of them find."""
# Under SLURM Lightning would go on from the place of a job by itself; here `resume` says so.
_CheckpointConnector._hpc_resume_path = None


def train(config: DictConfig) -> Path:
    """Train what the config says; returns the folder that was written."""
    log_once()
    output = Path(config.output_dir)
    state = state_of(config.resume, output)
    L.seed_everything(config.seed)
    dtype = OmegaConf.select(config, "target.dtype")
    dtype = dtype if dtype and get_class(config.training._target_).runs_target else "float32"
    config.trainer.precision = precision(
        config.trainer.precision, config.trainer.accelerator, dtype
    )
    with lightning_in_one_sentence(config.trainer, built=False):
        trainer = build(
            config.trainer,
            logger=[build(node) for node in (config.logger or {}).values() if node],
            callbacks=[build(node) for node in (config.callbacks or {}).values() if node],
        )
    check_trainer(trainer, config.trainer)
    launch(trainer, output)
    own = {}  # what answers before the first step is where it is trained then
    if OmegaConf.select(config, "target.device") == "auto":
        strategy = trainer.strategy
        own = {} if isinstance(strategy, ShardedTarget) else {"device": str(strategy.root_device)}
    content, data = recorded(config), build(config.data)
    parts = {"target": build(config.target, **own), "speculator": build(config.get("speculator"))}
    module = build(config.training, **{name: part for name, part in parts.items() if part})
    run = identity(module, content)
    check_settings(state, run)
    module.prepare(data)
    module.run = run | data_of(module)
    finished = Finished(output, module.run, content["trainer"])
    if config.check:
        check_validations(trainer, len(module.data.train_dataloader()))
        tell_run(trainer, module)
        say("check: configuration, data and models fit; nothing was trained")
        return output
    if config.resume == "auto":
        if finished.says_so():
            say(f"finished: {output / 'model'} is there, and nothing is left to do")
            return output / "model"
        going_on = f"from {state}" if state else "nothing to go on from, so it is a new run"
        say(f"resume: {going_on}")
    with followed(tracked(trainer.loggers), content):
        with lightning_in_one_sentence(config.trainer):
            start(trainer, module, data, state, output)
        folder = finish(trainer, module, output, content)
    if trainer.is_global_zero:
        finished.note()
    return folder


def start(
    trainer: L.Trainer, module: L.LightningModule, data, state: Path | None, output: Path
) -> None:
    """Fit, from the checkpoint `state` if one is given.

    A run that is interrupted ends the process, with 143 (SIGTERM) or 130 (Ctrl-C), and one that
    lost a process of several with 1.
    """
    try:
        with enough_memory("training", ROOM):
            trainer.fit(module, datamodule=data, ckpt_path=state, weights_only=True)
    except RuntimeError as error:
        lost = isinstance(error, DistError) or "gloo/transport" in str(error)
        if trainer.world_size > 1 and lost:
            end_alone(output)
        raise
    except SIGTERMException:  # which would exit with 0
        sys.exit(TERMINATED)
    except SystemExit as ended:  # Lightning's answer to Ctrl-C
        sys.exit(BY_CTRL_C if ended.code == 1 else ended.code)


@contextmanager
def lightning_in_one_sentence(settings: dict, built: bool = True) -> Iterator[None]:
    """Turn an error that Lightning raises into an `InputError` with its text, which names the first
    of the trainer's `settings` that the text mentions. Once the trainer is `built`, an error that
    mentions none is raised as it is."""
    try:
        yield
    except (MisconfigurationException, ValueError, TypeError, ImportError, RuntimeError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if isinstance(error, InputError) or Path(L.__file__).parent not in raised_in.parents:
            raise
        reason = "; ".join(re.split(r"[.!]?\s*\n\s*|[.!]\s+", str(error).strip(" .!\n")))
        texts = {value: name for name, value in settings.items() if isinstance(value, str)}
        known = {name: name for name in settings} | texts
        named = [known[word] for word in re.findall(r"[\w-]+", reason) if word in known]
        if "monitored key" in reason or "conditioned on metric" in reason:
            raise InputError(f"callbacks: {reason}; give a metric that is logged") from error
        if built and (not named or isinstance(error, RuntimeError)):
            raise
        field = ".".join(["trainer", *named[:1]])
        raise InputError(f"{field}: {reason}; choose another value") from error


def check_trainer(trainer: L.Trainer, settings: dict) -> None:
    """`InputError` for what Lightning has, and what training here would not do right."""
    for name in ("logger", "callbacks"):
        if name in settings:
            raise InputError(f"trainer.{name}: it is not read here; give {name}=NAME (conf/{name})")
    if trainer.overfit_batches:
        raise InputError(
            "trainer.overfit_batches: every epoch has other batches; give debug=overfit"
        )
    timed = any(isinstance(callback, Timer) for callback in trainer.callbacks)
    endless = trainer.max_epochs == -1 or (trainer.max_epochs is None and timed)
    if trainer.max_steps < 0 and endless:
        raise InputError(
            "trainer.max_epochs, trainer.max_steps: set one of them, at whose end the learning "
            "rate is 0; trainer.max_time may end the run sooner"
        )
    started = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1)
    if started not in (1, trainer.world_size):
        raise InputError(
            f"trainer.devices, trainer.num_nodes: {started} processes were started, and these are "
            f"for {trainer.world_size}, so that each would train alone; give as many devices as "
            "processes on a machine, and the number of machines"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler | WeightAveraging):
            raise InputError(
                f"callbacks: with {type(callback).__name__} a run could not go on from where it "
                "was; leave it out"
            )
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        raise InputError(
            "trainer.strategy: what processes of its kind learn does not come back; give ddp"
        )


def check_validations(trainer: L.Trainer, num_batches: int) -> None:
    """`InputError` where validations would be more than an epoch of so many batches apart, as
    Lightning says it when it has begun."""
    interval, batches = trainer.val_check_interval, epoch_batches(trainer, num_batches)
    if type(interval) is int and trainer.check_val_every_n_epoch and interval > batches:
        raise InputError(
            f"trainer.val_check_interval: {interval} is more than the {batches} batches of an "
            "epoch; lower it, or give a share of the epoch such as 1.0"
        )


def precision(given: str | int, accelerator: str, target_dtype: str) -> str | int:
    """What Lightning is to compute in: of `auto` mixed precision, but float32 on a CPU that would
    emulate bfloat16; `InputError` where that does not go with the target's numbers."""
    if given == "auto":
        on_cpu = accelerator == "cpu" or not (torch.cuda.is_available() or accelerator != "auto")
        slow = on_cpu and not packing_available(torch.bfloat16)
        if slow and target_dtype == "bfloat16":
            print("note: this CPU emulates bfloat16; target.dtype=float32 trains much faster here")
        return "32-true" if slow and target_dtype == "float32" else "bf16-mixed"
    if str(given).endswith("16-true"):
        raise InputError(
            f"trainer.precision: {given} would round rotary frequencies, too; give bf16-mixed"
        )
    if str(given).startswith("32") and target_dtype != "float32":
        raise InputError(
            f"trainer.precision: {given} does not go with a target in {target_dtype}; give auto, "
            "or target.dtype=float32"
        )
    return given


def finish(trainer: L.Trainer, module: L.LightningModule, output: Path, config: dict) -> Path:
    """Go back to the best checkpoint and write the model folder; returns that folder. Raises
    `InputError` where nothing was trained."""
    if not trainer.global_step:
        raise InputError(
            "trainer: no step was taken, so nothing was saved; give more time, or more steps"
        )
    folder = output / "model"
    if not trainer.is_global_zero:  # another process writes it
        return folder
    kept, score = trainer.checkpoint_callback, None
    if getattr(kept, "monitor", None) and kept.best_model_path:  # others keep what came last
        score = kept.best_model_score
        how = dict(map_location="cpu", weights_only=True, mmap=True)
        state = torch.load(kept.best_model_path, **how)  # the moments stay on the disk
        module.load_state_dict(state["state_dict"], strict=False)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.isfinite().all():
            raise InputError(
                f"training: it ended with NaN or infinity in {name}, so nothing was saved; give a "
                "smaller training.learning_rate"
            )
    module.save(folder, card(module, config, trainer, score))
    for logger in tracked(trainer.loggers) if config.get("speculator") else ():
        logger.experiment.log_artifact(folder, name=f"run-{logger.version}", type="model")
    print(f"saved to {folder}" + ("" if score is None else f" (best state, {float(score):.3f})"))
    if score is not None and kept.monitor == "validation/tau" and score < LOW_TAU:
        print("warning: hardly any draft is accepted; train for longer, or on more answers")
    return folder
