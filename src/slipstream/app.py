"""The entry points: train(config), infer(config), serve(config). They instantiate and call."""

import difflib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from slipstream.configuration import (
    RENAMED,
    REPLACED,
    Command,
    build,
    check_config,
    own_part,
    recorded,
)
from slipstream.core.errors import InputError
from slipstream.core.settings import nearest

if TYPE_CHECKING:
    from slipstream.core.sampling import Sampling
    from slipstream.decoding.answer import Limits
    from slipstream.targets.target import Target

STUDY_KEYS = ("target", "data", "study", "engine", "num_prompts", "threads")


def run(main: Callable[[], None]) -> None:
    """Run a Hydra entry point; one sentence ends it for what Hydra refuses: a config that cannot be
    composed, and a folder that cannot be written."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        main()
    except Exception as error:
        # Hydra makes the folder and a log file in it before anything of ours runs.
        called = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        if called & {each.__code__ for each in (train, infer, serve)}:
            raise
        theirs = isinstance(error, HydraException | OmegaConfBaseException)
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError) and not theirs:
            place = f"{cause.filename} ({cause.strerror})"
            _stop(f"output_dir: cannot write to {place}; choose another folder")
        if not (theirs or isinstance(error, ValueError | AssertionError)):
            raise
        said = str(error).strip().partition("\n")[0].rstrip(".:").replace(". ", ": ")
        said = said or "hydra: a key below it has a value that Hydra does not take"
        _stop(f"config: {said}; {_remedy(error)}")


def _remedy(error: Exception) -> str:
    """What to do about a config that cannot be composed: of its group, take what is nearest."""
    overridden = re.search(r"Could not override '([\w.]+)'", str(error))
    for key, successor in REPLACED.items():
        if overridden and f"{overridden[1]}.".startswith(f"{key}."):
            return f"in its place is {successor}"
    beside = getattr(error.__cause__, "parent_node", None)
    if overridden and isinstance(beside, DictConfig):
        return nearest(overridden[1].rpartition(".")[2], [str(key) for key in beside])
    name = getattr(error, "missing_cfg_file", None) or ""
    if name in RENAMED:
        return f"it is now {RENAMED[name]}"
    group, _, missing = name.partition("/")
    searched = re.search(r"provider=main, path=file://(.+)", str(error))
    folder = Path(searched[1]) / group if searched and missing else None
    if folder is None or not folder.is_dir():
        return "check its spelling against conf/ (unknown keys are errors, also with +)"
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")]
    return f"the nearest is {group}={difflib.get_close_matches(missing, names, 1, 0.0)[0]}"


@contextmanager
def one_sentence() -> Iterator[None]:
    """Bad input ends with its one sentence and exit code 2, no traceback; Ctrl-C with 130."""
    try:
        yield
    except InputError as error:
        _stop(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _stop(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def in_own_folder(config: DictConfig) -> DictConfig:
    """In a multirun each run has a folder of its own below `output_dir`."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        config.output_dir = f"{hydra.sweep.dir}/{hydra.sweep.subdir}"
    return config


def _checked(config: DictConfig, own: type[Command], others: Callable | None = None) -> DictConfig:
    """The config of one command; `InputError` for what no run can use. others(): the one that an
    experiment may be of, too."""
    if others is not None and OmegaConf.select(config, "both_commands"):
        config = own_part(config, own, others())
    check_config(config, own)
    if OmegaConf.select(config, "target.device") == "meta":
        raise InputError(
            "target.device: a target on 'meta' has neither weights nor a tokenizer, so nothing can "
            "be run on it; give auto, cpu or cuda"
        )
    return config


def _train_schema() -> type[Command]:
    """Its import takes Lightning's seconds, so only who needs it asks for it."""
    from slipstream.training.command import Train

    return Train


def train(config: DictConfig) -> Path:
    """Train what the config says; returns the folder that was written."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    from slipstream.commands import Infer
    from slipstream.core.files import SUMS
    from slipstream.core.resuming import stoppable
    from slipstream.speculators.checkpoint import check_replaceable, owned
    from slipstream.training.command import Train

    config = _checked(config, Train, lambda: Infer)
    output = Path(config.output_dir)
    model = output / "model"
    written = tuple(f"checkpoints/{name}.ckpt" for name in ("best", "last", "interrupted"))
    own = owned(output, "output_dir", written, ("checkpoints", "metrics"))
    with stoppable(output), nullcontext() if rank_zero_only.rank else own:
        if config.get("speculator") or not (model / SUMS).is_file():
            check_replaceable(model)
        return _train(config, output)


def _train(config: DictConfig, output: Path) -> Path:
    import lightning as L
    from hydra.utils import get_class

    from slipstream.training.resuming import Finished, identity, state_of
    from slipstream.training.run import finish, lightning_in_one_sentence, precision, start
    from slipstream.training.together import launch
    from slipstream.training.tracking import log_config, log_once

    log_once()
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
            logger=list(map(build, (config.logger or {}).values())),
            callbacks=[build(node) for node in (config.callbacks or {}).values() if node],
        )
    launch(trainer, output)
    parts = {"target": build(config.target), "speculator": build(config.get("speculator"))}
    module = build(config.training, **{name: part for name, part in parts.items() if part})
    data = build(config.data)
    module.prepare(data)
    content = recorded(config)
    module.run = identity(module, content)
    finished = Finished(output, module.run, content["trainer"])
    if config.check:
        print("check: configuration, data and models fit; nothing was trained")
        return output
    if config.resume == "auto":
        if finished.says_so():
            print(f"finished: {output / 'model'} is there, and nothing is left to do")
            return output / "model"
        print(
            f"resume: {f'from {state}' if state else 'nothing to go on from, so it is a new run'}"
        )
    log_config(trainer.loggers, content)
    with lightning_in_one_sentence(config.trainer):
        start(trainer, module, data, state, output)
    folder = finish(trainer, module, output, content)
    if trainer.is_global_zero:
        finished.note()
    return folder


def infer(config: DictConfig) -> list:
    """Answer one prompt, converse, or compare methods on many; returns the result records."""
    import torch

    from slipstream.commands import Infer
    from slipstream.core.resuming import flattened, journal, stoppable
    from slipstream.decoding.calibrated import described
    from slipstream.evaluation.methods import made_at
    from slipstream.evaluation.run import answer_one, converse, decoder_of
    from slipstream.results.record import environment
    from slipstream.results.writer import check_replaceable
    from slipstream.speculators.checkpoint import owned
    from slipstream.targets.compiled import compile_target
    from slipstream.targets.packed import is_fused, unpack_linears

    config = _checked(config, Infer, _train_schema)
    others = config.calibrate or config.study is not None or config.prompt is not None
    if config.verify and (others or config.chat):
        raise InputError(
            "verify: compares methods on the prompts of data; leave out prompt, chat, calibrate "
            "and study"
        )
    if config.chat and others:
        raise InputError("chat: asks for its prompts; leave out prompt, calibrate and study")
    if config.threads:
        torch.set_num_threads(config.threads)
    output = Path(config.output_dir)
    check_replaceable(output)
    target = compile_target(build(config.target), config.engine.compile)
    if config.verify and is_fused(target.model):  # the products of `generate`, to the last bit
        unpack_linears(target.model)
    sampling, limits = build(config.sampling), build(config.limits)
    content = recorded(config)
    if config.prompt is not None or config.chat:
        chosen = [name for name, node in config.methods.items() if node is not None]
        if not chosen:
            raise InputError("methods: nothing to answer with; name at least one method")
        method = made_at(f"methods.{chosen[-1]}", partial(build, config.methods[chosen[-1]]))
        if config.chat:
            return converse(decoder_of(method, target, sampling, limits), config.seed)
        return answer_one(target, method, sampling, limits, config.prompt, config.seed)
    run = described(content) | {"target": target.fingerprint, "environment": environment(target)}
    del run["output_dir"], run["resume"]
    with (
        stoppable(output),
        owned(output, "output_dir", ("findings.jsonl", "results.json", "plot.png")),
        journal(output / "findings.jsonl", flattened(run), config.resume == "auto"),
    ):
        return _measure(config, target, sampling, limits, output, content)


def _measure(
    config: DictConfig,
    target: "Target",
    sampling: "Sampling",
    limits: "Limits",
    output: Path,
    content: dict,
) -> list:
    """Compare methods, verify, calibrate or run a study; returns the result records."""
    from slipstream.evaluation.methods import prepared
    from slipstream.evaluation.run import compare_methods, verify_methods
    from slipstream.results.record import environment
    from slipstream.results.writer import show, write

    data = build(config.data)
    if config.calibrate:
        calibrating, drafter = build(config.calibration), build(config.drafter)
        others = build(OmegaConf.merge(config.data, {"split": "validation"}))
        prompts = others.take_for(target, limits, calibrating.num_prompts)
        return calibrating.run(target, drafter, prompts, sampling, limits, output, content)
    prompts = data.take_for(target, limits, config.num_prompts)
    if config.study is not None:
        if not sampling.greedy:
            raise InputError(
                "study: a study chooses its own sampling; leave sampling.temperature at 0"
            )
        content = {name: content[name] for name in STUDY_KEYS}
        result = build(config.study, target=target, prompts=prompts)
        show(result)
        write(output, result, content, environment(target, content["study"]))
        return result.rows
    made = {name: partial(build, node) for name, node in config.methods.items() if node is not None}
    methods = prepared("methods", made, target, sampling, limits, config.leave_out_unfit)
    given, ways = (target, methods, prompts, sampling, limits), (config.seed, config.batch_size)
    if config.verify:
        return verify_methods(*given, *ways)
    return compare_methods(*given, config.repeats, *ways, output, content)


def serve(config: DictConfig) -> None:
    """Answer requests over HTTP until the process is told to end."""
    from slipstream.serving.server import Serve, Server, decoder_of, settings_of

    config = _checked(config, Serve)
    OmegaConf.resolve(config)  # workers are processes of their own
    logging.getLogger("slipstream.serving").setLevel(logging.INFO)
    server: Server = build(config.server)
    settings = settings_of(config, server)
    where = config.target.device, config.target.get("device_map") is not None
    server.run(partial(decoder_of, config), settings, *where)
