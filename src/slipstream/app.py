"""The two entry points: train(config) and infer(config). Instantiate and call, nothing else."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# oneDNN compiles a kernel for every new shape; with its default of 1,024 a training run would
# compile some again and again. It reads this when first used.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")

from omegaconf import DictConfig, OmegaConf

from slipstream.configuration import build, check_keys, own_part
from slipstream.core.errors import InputError

TRAIN_KEYS = frozenset(
    [
        "target",
        "speculator",
        "data",
        "training",
        "trainer",
        "logger",
        "callbacks",
        "seed",
        "check",
        "resume",
        "output_dir",
    ]
)
INFER_KEYS = frozenset(
    [
        "target",
        "drafter",
        "speculator_path",
        "batch_size",
        "data",
        "methods",
        "study",
        "sampling",
        "limits",
        "budget",
        "engine",
        "prompt",
        "verify",
        "calibrate",
        "calibration",
        "num_prompts",
        "repeats",
        "seed",
        "threads",
        "output_dir",
    ]
)


STUDY_KEYS = ("target", "data", "study", "engine", "num_prompts", "threads")


def run(main: Callable[[], None]) -> None:
    """Run a Hydra entry point; a config that cannot be composed ends with one sentence."""
    from hydra.errors import ConfigCompositionException, OverrideParseException

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        main()
    except (ConfigCompositionException, OverrideParseException) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        hint = "check its spelling against conf/ (unknown keys are errors, also with +)"
        _stop(f"config: {lines[0].rstrip('.:')}; {hint}")
    except (OSError, ValueError) as error:
        # Hydra makes the folder and a log file in it before anything of ours runs.
        cause = error if isinstance(error, OSError) else error.__cause__
        called = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        if not isinstance(cause, OSError) or called & {train.__code__, infer.__code__}:
            raise
        place = f"{cause.filename} ({cause.strerror})"
        _stop(f"output_dir: cannot write to {place}; choose another folder")


@contextmanager
def one_sentence() -> Iterator[None]:
    """Bad input ends with its one sentence and exit code 2, no traceback."""
    try:
        yield
    except InputError as error:
        _stop(str(error))


def _stop(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def train(config: DictConfig) -> Path:
    """Train what the config says; returns the folder that was written."""
    config = own_part(config, TRAIN_KEYS, INFER_KEYS)
    check_keys(config, TRAIN_KEYS)
    import lightning as L

    from slipstream.speculators.checkpoint import check_replaceable, check_writable
    from slipstream.training.run import finish, lightning_in_one_sentence, start

    output = Path(config.output_dir)
    check_writable(output, "output_dir")
    if config.get("speculator"):
        check_replaceable(output / "model")
    L.seed_everything(config.seed)
    with lightning_in_one_sentence(config.trainer):
        trainer = build(
            config.trainer,
            logger=list(map(build, (config.logger or {}).values())),
            callbacks=[build(node) for node in (config.callbacks or {}).values() if node],
        )
    parts = {"target": build(config.target), "speculator": build(config.get("speculator"))}
    module = build(config.training, **{name: part for name, part in parts.items() if part})
    data = build(config.data)
    module.prepare(data)
    if config.check:
        print("check: configuration, data and models fit; nothing was trained")
        return output
    with lightning_in_one_sentence(config.trainer):
        start(trainer, module, data, config.resume)
    return finish(trainer, module, output, OmegaConf.to_container(config, resolve=True))


def infer(config: DictConfig) -> list:
    """Answer one prompt, or compare methods on many; returns the result records."""
    config = own_part(config, INFER_KEYS, TRAIN_KEYS)
    check_keys(config, INFER_KEYS)
    import torch

    from slipstream.evaluation.auto import Auto
    from slipstream.evaluation.prompts import fitting
    from slipstream.evaluation.run import answer_one, compare_methods, run_study, verify_methods
    from slipstream.targets.compiled import compile_target

    if config.threads:
        torch.set_num_threads(config.threads)
    target = compile_target(build(config.target), config.engine.compile)
    sampling, limits = build(config.sampling), build(config.limits)
    if config.prompt is not None:
        chosen = [node for node in config.methods.values() if node is not None]
        if not chosen:
            raise InputError("methods: nothing to answer with; name at least one method")
        return answer_one(target, build(chosen[-1]), sampling, limits, config.prompt, config.seed)
    data = build(config.data)
    cut_to = target.max_positions - limits.max_new_tokens if data.cut else None
    if config.calibrate:
        calibrating, output = build(config.calibration), Path(config.output_dir)
        others = build(OmegaConf.merge(config.data, {"split": "validation"}))
        prompts = fitting(others.take(calibrating.num_prompts), target, cut_to)
        return calibrating.run(target, build(config.drafter), prompts, sampling, limits, output)
    taken = data.take(config.num_prompts)
    prompts = fitting(taken, target, cut_to)
    if config.study is not None:
        if not sampling.greedy:
            raise InputError(
                "study: a study chooses its own sampling; leave sampling.temperature at 0"
            )
        study, content = build(config.study), OmegaConf.to_container(config, resolve=True)
        content = {name: content[name] for name in STUDY_KEYS}
        return run_study(study, target, prompts, Path(config.output_dir), content)
    methods = {name: build(node) for name, node in config.methods.items() if node is not None}
    for method in methods.values():
        if isinstance(method, Auto):
            # of the same split, and none of those that are measured
            tried = fitting(data.beside(taken, method.num_prompts), target, cut_to)
            method.choose(tried, target, sampling, limits, config.batch_size)
    if config.verify:
        return verify_methods(target, methods, prompts, sampling, limits, config.seed)
    return compare_methods(
        target,
        methods,
        prompts,
        sampling,
        limits,
        config.repeats,
        config.seed,
        config.batch_size,
        Path(config.output_dir),
        OmegaConf.to_container(config, resolve=True),
    )
