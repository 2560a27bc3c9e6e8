"""The entry points: train(config), infer(config), serve(config). They instantiate and call."""

import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from slipstream.configuration import Command, build, check_config, own_part, recorded
from slipstream.core.errors import InputError

TASKS = ("verify", "chat", "calibrate", "study", "prompt")
"""What `infer` may be asked for in place of a comparison, one at a time."""
UNREAD_BY_STUDIES = "drafter methods budget batch_size repeats calibration leave_out_unfit".split()
"""Keys of a comparison; a study that has them names them."""
STUDY_KEYS = ("target", "data", "study", "engine", "num_prompts", "threads")


def _checked(config: DictConfig, own: type[Command]) -> DictConfig:
    """The config of one command; `InputError` for what no run can use."""
    target = config.get("target")
    if isinstance(target, DictConfig) and "_target_" not in target:  # what ~target leaves
        config.target = None
    check_config(config, own)
    if OmegaConf.select(config, "target.device") == "meta":
        raise InputError(
            "target.device: a target on 'meta' has neither weights nor a tokenizer, so nothing can "
            "be run on it; give auto, cpu or cuda"
        )
    return config


def train(config: DictConfig) -> Path:
    """Train what the config says; returns the folder that was written."""
    from hydra.core.hydra_config import HydraConfig
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    from slipstream.commands import Infer
    from slipstream.core.files import SUMS
    from slipstream.core.resuming import owned, stoppable
    from slipstream.speculators.checkpoint import check_replaceable
    from slipstream.training.command import Train

    config = _checked(own_part(config, Train, Infer), Train)
    if rank_zero_only.rank and HydraConfig.initialized():  # the default is a time of its own
        config.output_dir = HydraConfig.get().runtime.output_dir
    output = Path(config.output_dir)
    model = output / "model"
    written = tuple(f"checkpoints/{name}.ckpt" for name in ("best", "last", "interrupted"))
    own = owned(output, written, ("checkpoints", "metrics"))
    with stoppable(output), nullcontext() if rank_zero_only.rank else own:
        if config.get("speculator") or not (model / SUMS).is_file():
            check_replaceable(model)
        return _train(config, output)


def _train(config: DictConfig, output: Path) -> Path:
    import lightning as L
    from hydra.utils import get_class

    from slipstream.training.resuming import Finished, check_settings, data_of, identity, state_of
    from slipstream.training.run import (
        check_trainer,
        finish,
        lightning_in_one_sentence,
        precision,
        start,
    )
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
            logger=[build(node) for node in (config.logger or {}).values() if node],
            callbacks=[build(node) for node in (config.callbacks or {}).values() if node],
        )
    check_trainer(trainer, config.trainer)
    launch(trainer, output)
    parts = {"target": build(config.target), "speculator": build(config.get("speculator"))}
    module = build(config.training, **{name: part for name, part in parts.items() if part})
    content, data = recorded(config), build(config.data)
    run = identity(module, content)
    check_settings(state, run)
    module.prepare(data)
    module.run = run | data_of(module)
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
    from slipstream.core.resuming import flattened, journal, owned, stoppable
    from slipstream.decoding.calibrated import described
    from slipstream.evaluation.methods import prepared
    from slipstream.evaluation.run import answer_one, converse, showing
    from slipstream.results.record import environment
    from slipstream.results.writer import check_replaceable
    from slipstream.targets.compiled import compile_target
    from slipstream.targets.packed import is_fused, unpack_linears

    if OmegaConf.select(config, "both_commands"):
        from slipstream.training.command import Train  # which takes Lightning's seconds

        config = own_part(config, Infer, Train)
    config = _checked(config, Infer)
    tasks = [name for name in TASKS if config[name] not in (None, False)]
    if len(tasks) > 1:
        raise InputError(f"{tasks[0]}: cannot be combined with {tasks[1]}; leave one of them out")
    if config.prompt is not None and not config.prompt.strip():
        raise InputError("prompt: it is empty; give some text")
    if config.study is not None:
        _check_study(config)
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
        made = {chosen[-1]: lambda: showing(build(config.methods[chosen[-1]]))}
        (method,) = prepared("methods", made, target, sampling, limits, False).values()
        if config.chat:
            converse(method.decoder, config.seed)
        else:
            answer_one(method.decoder, config.prompt, config.seed)
        return []
    run = described(content) | {"target": target.fingerprint, "environment": environment(target)}
    del run["output_dir"], run["resume"]
    with (
        stoppable(output),
        owned(output, ("findings.jsonl", "results.json", "plot.png")),
        journal(output / "findings.jsonl", flattened(run), config.resume == "auto"),
    ):
        return _measure(config, target, sampling, limits, output, content)


def _measure(config: DictConfig, target, sampling, limits, output: Path, content: dict) -> list:
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


def _check_study(config: DictConfig) -> None:
    """`InputError` for a key on the command line that the study takes no notice of."""
    from hydra.core.hydra_config import HydraConfig

    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    reads = str(OmegaConf.to_container(config.study, resolve=False))
    for name in (each.lstrip("+~").partition("=")[0].partition(".")[0] for each in given):
        if name in UNREAD_BY_STUDIES and f"${{{name}" not in reads:
            raise InputError(f"{name}: this study does not use it, or sets its own; leave it out")


def serve(config: DictConfig) -> None:
    """Answer requests over HTTP until the process is told to end."""
    from slipstream.serving.server import Serve, Server, decoder_of

    config = _checked(config, Serve)
    OmegaConf.resolve(config)  # workers are processes of their own
    logging.getLogger("slipstream.serving").setLevel(logging.INFO)
    server: Server = build(config.server)
    given = build(config.sampling), build(config.limits)
    where = config.target.device, config.target.get("device_map") is not None
    server.run(partial(decoder_of, config), *given, *where)
