"""The entry points: train(config), infer(config), serve(config). They check, and call what runs."""

import logging
from contextlib import nullcontext
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from slipstream.configuration import Command, build, check_config, own_part, recorded
from slipstream.core.errors import InputError
from slipstream.core.files import SUMS
from slipstream.core.resuming import flattened, journal, owned, stoppable

TASKS = ("verify", "chat", "calibrate", "study", "prompt")
"""What `infer` may be asked for in place of a comparison, one at a time."""
OF_A_COMPARISON = "methods budget batch_size repeats leave_out_unfit".split()
OF_MANY_PROMPTS = "num_prompts batch_size repeats resume".split()
UNREAD = {
    "study": [*OF_A_COMPARISON, "drafter", "calibration"],
    "calibrate": [*OF_A_COMPARISON, "num_prompts"],
    "prompt": OF_MANY_PROMPTS,
    "chat": OF_MANY_PROMPTS,
}
"""Keys that these take no notice of; a study that has some of them names them."""


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
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    from slipstream.commands import Infer
    from slipstream.speculators.checkpoint import check_replaceable
    from slipstream.training import run
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
        return run.train(config)


def infer(config: DictConfig) -> list:
    """Answer one prompt, converse, or compare methods on many; returns the result records."""
    from slipstream.commands import Infer
    from slipstream.decoding.calibrated import described
    from slipstream.evaluation.methods import prepared
    from slipstream.evaluation.run import converse, measure, showing, tell
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
    if tasks and tasks[0] in UNREAD:
        _check_read(config, tasks[0])
    if config.threads:
        torch.set_num_threads(config.threads)
    output = Path(config.output_dir)
    check_replaceable(output)
    if config.prompt is None and not config.chat:
        build(config.data)  # a path that is not there is said before weights are loaded
    target = compile_target(build(config.target), config.engine.compile)
    if config.verify and is_fused(target.model):  # the products of `generate`, to the last bit
        unpack_linears(target.model)
    sampling, limits = build(config.sampling), build(config.limits)
    if config.prompt is not None or config.chat:
        chosen = [name for name, node in config.methods.items() if node is not None]
        if not chosen:
            raise InputError("methods: nothing to answer with; name at least one method")
        made = {chosen[-1]: lambda: showing(build(config.methods[chosen[-1]]))}
        (method,) = prepared("methods", made, target, sampling, limits, False).values()
        if config.chat:
            converse(method.decoder, config.seed)
        else:
            tell(method.decoder, config.prompt, config.seed)
        return []
    now = {"target": target.fingerprint, "environment": environment(target)}
    run = described(recorded(config)) | now
    del run["output_dir"], run["resume"]
    with (
        stoppable(output),
        owned(output, ("findings.jsonl", "results.json", "plot.png")),
        journal(output / "findings.jsonl", flattened(run), config.resume == "auto"),
    ):
        return measure(config, target, sampling, limits)


def _check_read(config: DictConfig, task: str) -> None:
    """`InputError` for a key on the command line that `task` takes no notice of."""
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    reads = str(OmegaConf.to_container(config.study, resolve=False)) if task == "study" else ""
    for name in (each.lstrip("+~").partition("=")[0].partition(".")[0] for each in given):
        if name in UNREAD[task] and f"${{{name}" not in reads:
            own = task == "calibrate" and name in ("num_prompts", "repeats")
            remedy = f"give calibration.{name}" if own else "leave it out"
            raise InputError(f"{name}: {task}= does not use it, or has its own; {remedy}")


def serve(config: DictConfig) -> None:
    """Answer requests over HTTP until the process is told to end."""
    from slipstream.serving.server import Serve

    config = _checked(config, Serve)
    OmegaConf.resolve(config)  # workers are processes of their own
    logging.getLogger("slipstream.serving").setLevel(logging.INFO)
    build(config.server).run(config)
