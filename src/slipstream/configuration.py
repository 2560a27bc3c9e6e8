"""Configs: unknown keys are errors, and so is anything that a constructor does not take.

Hydra itself accepts `+key=1`; this file does not. It knows no component.
"""

import inspect
import re

import hydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf

from slipstream.core.errors import InputError, naming

_GIVEN = "data=jsonl data.regenerate=false"
_GPT2 = "experiment=sprinter_real target=gpt2_xl draft=openai-community/gpt2"
_GPT_NEO = "experiment=sprinter_real target=gpt_neo_1b3 draft=EleutherAI/gpt-neo-125m"
RENAMED = {
    **{
        f"drafter/{rule}": f"drafter=adaptive length={rule}"
        for rule in "adaedl assistant_threshold disco gammatune gammatune_plus heuristic "
        "specdec_plus_plus".split()
    },
    **{
        f"experiment/{target}": f"experiment=real_target target={target}"
        for target in "gpt2_xl gpt_neo_1b3 llama2_7b_chat llama2_13b_chat llama3_8b_instruct "
        "mistral_7b_instruct opt_1b3 opt_6b7 phi3_mini qwen3_8b vicuna_7b vicuna_13b "
        "vicuna_33b".split()
    },
    "experiment/sprinter_gpt2": _GPT2,
    "experiment/sprinter_gpt_neo": _GPT_NEO,
    "experiment/acceptance_gpt2": f"{_GPT2} speculator=acceptance",
    "experiment/acceptance_gpt_neo": f"{_GPT_NEO} speculator=acceptance",
    **{
        f"experiment/evidence/{name}": f"study={name}"
        for name in "acceptance applications batches context draft_lengths draft_size "
        "draft_size_others drafting_costs gradients msa_layers overheads peeking pruning "
        "quantization segments similarity sprinter_theory top_k_sampling trees two_models "
        "value_rotation verifier".split()
    },
    **dict.fromkeys(("experiment/evidence/device", "study/device"), "study=scale"),
    **dict.fromkeys(
        ("experiment/streaming_budgets", "methods/budgets"), "study=batches batch_size=1"
    ),
    "experiment/application_baseline": "experiment=[fine_tuning,application] "
    "training.learning_rate=1e-3",
    "experiment/application_lossless": "experiment=application target.adapter=FOLDER "
    "speculator.adapter_rank=32 data.regenerate=true training.learning_rate=4e-3",
    "data/given": _GIVEN,
    **{f"data/{name}": f"{_GIVEN} hub={name}" for name in ("dialogsum", "e2e", "wikisql")},
    **{
        f"data/{name}": f"{_GIVEN} hub={name} data.max_new_tokens=20"
        for name in ("lm1b", "wikipedia")
    },
    "data/e2e_wikisql": f"{_GIVEN} hub=[e2e,wikisql]",
    "data/ultrachat": "hub=ultrachat data.max_train_rows=60000 data.max_length=2048 "
    "data.batch_tokens=8192 data.max_new_tokens=1024",
    **{
        f"data/prompts_{name}": f"hub={name}"
        for name in ("dialogsum", "e2e", "lm1b", "wikipedia", "wikisql")
    },
}
"""The overrides that replace a config of an earlier name, by its group and name."""
REPLACED = dict.fromkeys(
    ("methods.auto.candidates", "methods.auto.num_prompts"),
    "methods.auto.drafter, which chooses among its drafters while it decodes",
)
"""What stands in the place of a key that is gone."""


def own_part(config: DictConfig, own: frozenset[str], others: frozenset[str]) -> DictConfig:
    """Without the keys of the other command, where an experiment says that it is for both."""
    if not OmegaConf.select(config, "both_commands"):
        return config
    left_out = {"both_commands"} | (others - own)
    return OmegaConf.masked_copy(config, [key for key in config if key not in left_out])


def check_keys(config: DictConfig, allowed: frozenset[str]) -> None:
    """`InputError` for an unknown or an unset key, anywhere in the config."""
    unknown = sorted(set(map(str, config)) - allowed)
    if unknown:
        raise InputError(
            f"{unknown[0]}: unknown config key; the keys here are {', '.join(sorted(allowed))}"
        )
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise InputError(f"{missing[0]}: has no value; give one with {missing[0]}=...")
    for key in config:
        _check_node(config[key], str(key))


def build(node: DictConfig | None, **objects):
    """Instantiate a node with `_target_`; `objects` are further arguments. None stays None."""
    if node is None:
        return None
    try:
        # Called here, not by Hydra, which would turn dataclasses among `objects` into configs.
        return hydra.utils.instantiate(node, _partial_=True, _convert_="all")(**objects)
    except InstantiationException as error:
        cause, where = error.__cause__, re.search(r"full_key: (\S+)", str(error))
        if isinstance(cause, InputError) and where is not None:
            with naming(_path_before(where[1], str(cause))):
                raise cause from None
        raise cause or error from None


def _path_before(path: str, sentence: str) -> str:
    """The part of a config path that a sentence about what stands there leaves out.

    >>> _path_before("methods.mine.drafter", "drafter.schedule: must be one of fused, deferred")
    'methods.mine'
    """
    first = re.split(r"[.:]", sentence, maxsplit=1)[0]
    before, found, _ = f".{path}.".rpartition(f".{first}.")
    return before[1:] if found else path


def _check_node(node: object, path: str) -> None:
    if isinstance(node, ListConfig):
        for place, item in enumerate(node):
            _check_node(item, f"{path}[{place}]")
    if not isinstance(node, DictConfig):
        return
    if node.get("_target_") is not None:
        _check_arguments(node, path)
    for key in node:
        _check_node(node[key], f"{path}.{key}")


def _check_arguments(node: DictConfig, path: str) -> None:
    """Every key of a node must be an argument of what it names."""
    try:
        component = hydra.utils.get_object(node["_target_"])
    except Exception as error:
        cause = error.__cause__ or error
        raise InputError(
            f"{path}._target_: {node['_target_']!r} cannot be imported ({type(cause).__name__}: "
            f"{cause}); check the name, and the file it names"
        ) from error
    parameters = inspect.signature(component).parameters
    for key in node:
        if not str(key).startswith("_") and key not in parameters:
            raise InputError(
                f"{path}.{key}: unknown config key; {node['_target_'].rpartition('.')[2]} takes "
                f"{', '.join(name for name in parameters if name != 'self')}"
            )
