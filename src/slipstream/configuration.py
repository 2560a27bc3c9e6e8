"""Configs: every key is checked by the constructor that takes it, before anything is built.

Hydra itself accepts `+key=1`, and any `_target_`; this file does not. It knows no component.
"""

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib.metadata import entry_points
from inspect import isabstract, isclass, isfunction, signature
from typing import Any, ClassVar, get_args

import hydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from slipstream.core.errors import InputError, first_sentence
from slipstream.core.resuming import flattened
from slipstream.core.settings import Settings, arguments_of, check, shown

_GIVEN = "data=jsonl data.regenerate=false"
_GPT2 = "experiment=sprinter_real target=gpt2_xl draft=openai-community/gpt2"
_GPT_NEO = "experiment=sprinter_real target=gpt_neo_1b3 draft=EleutherAI/gpt-neo-125m"
_FAMILIES = {
    "drafter=adaptive length={}": "drafter/ adaedl assistant_threshold disco gammatune "
    "gammatune_plus heuristic specdec_plus_plus",
    "experiment=real_target target={}": "experiment/ gpt2_xl gpt_neo_1b3 llama2_7b_chat "
    "llama2_13b_chat llama3_8b_instruct mistral_7b_instruct opt_1b3 opt_6b7 phi3_mini qwen3_8b "
    "vicuna_7b vicuna_13b vicuna_33b",
    "study={}": "experiment/evidence/ acceptance applications batches context draft_lengths "
    "draft_size draft_size_others drafting_costs gradients msa_layers overheads peeking pruning "
    "quantization segments similarity sprinter_theory top_k_sampling trees two_models "
    "value_rotation verifier",
    f"{_GIVEN} hub={{}}": "data/ dialogsum e2e wikisql",
    f"{_GIVEN} hub={{}} data.max_new_tokens=20": "data/ lm1b wikipedia",
    "hub={}": "data/prompts_ dialogsum e2e lm1b wikipedia wikisql",
}
"""Overrides that each replace many old configs: the prefix of their names, then their endings."""
RENAMED = {
    **{
        f"{begin}{name}": successor.format(name)
        for successor, names in _FAMILIES.items()
        for begin, *ends in [names.split()]
        for name in ends
    },
    "experiment/sprinter_gpt2": _GPT2,
    "experiment/sprinter_gpt_neo": _GPT_NEO,
    "experiment/acceptance_gpt2": f"{_GPT2} speculator=acceptance",
    "experiment/acceptance_gpt_neo": f"{_GPT_NEO} speculator=acceptance",
    "experiment/evidence/device": "study=scale",
    "study/device": "study=scale",
    "experiment/streaming_budgets": "study=batches batch_size=1",
    "methods/budgets": "study=batches batch_size=1",
    "methods/baselines": "methods=all",
    "methods/unispec_thresholds": "drafter=unispec drafter.trust=1.0 drafter.threshold=0.05",
    "experiment/application_baseline": "experiment=[fine_tuning,application] "
    "training.learning_rate=1e-3",
    "experiment/application_lossless": "experiment=application target.adapter=FOLDER "
    "speculator.adapter_rank=32 data.regenerate=true training.learning_rate=4e-3",
    "data/given": _GIVEN,
    "data/e2e_wikisql": f"{_GIVEN} hub=[e2e,wikisql]",
    "data/ultrachat": "hub=ultrachat data.max_train_rows=60000 data.max_length=2048 "
    "data.batch_tokens=8192 data.max_new_tokens=1024",
}
"""The overrides that replace a config of an earlier name, by its group and name."""
REPLACED = dict.fromkeys(
    ("methods.auto.candidates", "methods.auto.num_prompts"),
    "methods.auto.drafter, which chooses among its drafters while it decodes",
)
"""Keys that are gone, and what to use in place of each."""


NEEDED = re.compile(r"\$\{needed:'?(.*?)'?\}|\?\?\?")
"""`${needed:}`, or `${needed:'WHAT TO GIVE'}`: as ???, where a config inherits a value, over which
OmegaConf merges no ???."""
PROJECT = "slipstream", "studies"
GROUPS = "slipstream.speculators", "slipstream.drafters"
LIGHTNING = tuple(
    f"lightning.pytorch.{name}"
    for name in "Trainer callbacks. loggers. plugins. profilers. strategies.".split()
)
"""Where else than the project, and packages with speculators of their own, a config may name
classes."""
BASES = set(
    "Trainer Callback Logger Profiler Strategy Precision ClusterEnvironment CheckpointIO "
    "LayerSync".split()
)
"""Of Lightning's classes a config may name these, and those derived from them."""


class Command(Settings):
    """Base of the schemas of commands: what their keys may be, in the order in which they are
    checked. given: of the part under a key, the arguments that come from other keys, or the run."""

    given: ClassVar[Mapping[str, Collection[str]]] = {}


def recorded(config: DictConfig) -> dict:
    """A config as records keep it: resolved, but for what it takes from the environment, which may
    be a secret; there it says from which variable."""
    OmegaConf.register_new_resolver("oc.env", lambda name, *_: f"${{oc.env:{name}}}", replace=True)
    try:
        return OmegaConf.to_container(config, resolve=True)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def own_part(config: DictConfig, own: type[Command], others: type[Command]) -> DictConfig:
    """Without the keys of the other command, where an experiment says that it is for both."""
    if not OmegaConf.select(config, "both_commands"):
        return config
    left_out = {"both_commands"} | (arguments_of(others).keys() - arguments_of(own).keys())
    return OmegaConf.masked_copy(config, [key for key in config if key not in left_out])


def check_config(config: DictConfig, command: type[Command]) -> None:
    """`InputError` for what the schema of the command, or a constructor named anywhere in the
    config, does not allow; nothing is built but settings."""
    try:
        given = flattened(OmegaConf.to_container(config))
        for name, value in sorted(given.items()):
            if isinstance(value, str) and (needed := NEEDED.fullmatch(value)):
                how = needed[1] or f"{name}=..."
                raise InputError(f"{name}: has no value; give one with {how}")
        content = OmegaConf.to_container(config, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None) or "config"
        raise InputError(f"{key}: {first_sentence(error)}; mend what refers there") from error
    allowed = arguments_of(command)
    nodes = [key for key in allowed if isinstance(content.get(key), dict | list)]
    parts = {key: each for key, each in content.items() if key not in nodes}
    check(command, parts, later=nodes)
    for key in nodes:
        own = allowed[key][1]
        schema = own if isinstance(own, type) and issubclass(own, Command) else None
        parts[key] = _stand_in(content[key], key, schema, command.given.get(key, ()))
        try:
            check(command, {key: parts[key]}, later=allowed)
        except InputError as error:
            raise InputError(f"{error}; choose another of conf/{key}") from None
    for key in command.given.keys() & set(nodes):
        component = component_of(content[key]["_target_"], key)
        taken = arguments_of(component)
        for name in command.given[key]:
            if name in allowed and name in taken:
                check(component, {name: parts.get(name)}, later=taken)
            elif parts.get(name) is not None:
                raise InputError(
                    f"{name}: {component.__name__} takes none; leave it out with ~{name}, or take "
                    f"another {key}"
                )


def _stand_in(
    node: object, path: str, schema: type[Command] | None = None, later: Collection[str] = ()
) -> object:
    """Check a node's arguments; returns a stand-in for the part that is to be built of it: settings
    are made, for other classes it is an empty object. schema: of a node without `_target_`; later:
    arguments that are not in the config."""
    if isinstance(node, list):
        return [_stand_in(each, f"{path}[{place}]") for place, each in enumerate(node)]
    if not isinstance(node, dict):
        return node
    component = component_of(node["_target_"], path) if "_target_" in node else schema
    given = {
        key: _stand_in(each, f"{path}.{key}") for key, each in node.items() if key != "_target_"
    }
    if component is None:
        return given
    check(component, given, path, later)
    for key in given:
        if _is_open(arguments_of(component)[key][1]) and _names_part(node[key]):
            raise InputError(f"{path}.{key}: no _target_ is built here; give plain values")
    kind = component if isinstance(component, type) else signature(component).return_annotation
    if not isinstance(kind, type) or isabstract(kind):
        raise InputError(f"{path}._target_: {component.__name__} makes no part; choose another")
    if not issubclass(kind, Settings) or kind is not component or later:
        return object.__new__(kind)
    try:
        return component(**given)
    except InputError as error:
        raise InputError(_with_path(path, str(error))) from None


def _is_open(annotation: object) -> bool:
    """Whether an annotation lets anything pass, somewhere within it."""
    inner = annotation if isinstance(annotation, list) else get_args(annotation)
    return annotation in (Any, object) or any(map(_is_open, inner))


def _names_part(node: object) -> bool:
    """Whether a `_target_` stands anywhere in a node."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return (isinstance(node, dict) and "_target_" in node) or any(map(_names_part, inner))


@cache
def packages() -> set[str]:
    """Names of the project's packages, and of those installed that have their own speculators or
    drafters."""
    others = [point for group in GROUPS for point in entry_points(group=group)]
    return {*PROJECT, *(each.module.partition(".")[0] for each in others)}


def component_of(name: object, path: str) -> Callable:
    """The class or function that `_target_` names; `InputError` for one that a config may not."""
    roots = packages()
    if not isinstance(name, str) or not (
        name.partition(".")[0] in roots or name.startswith(LIGHTNING)
    ):
        raise InputError(
            f"{path}._target_: {shown(name)} cannot be imported here; name a part of "
            f"{', '.join(sorted(roots))}, or Lightning's Trainer, callbacks, loggers, plugins, "
            "profilers or strategies; a package of your own needs an entry point of the group "
            f"{' or '.join(GROUPS)}"
        )
    try:
        found = hydra.utils.get_object(name)
    except Exception as error:
        cause = error.__cause__ or error
        raise InputError(
            f"{path}._target_: {name!r} cannot be imported ({type(cause).__name__}: "
            f"{first_sentence(cause)}); check the name, and the file it names"
        ) from error
    home = str(getattr(found, "__module__", "")).partition(".")[0]
    ours = home in roots and (isclass(found) or isfunction(found))
    bases = getattr(found, "__mro__", ()) if home == "lightning" else ()
    theirs = any(b.__name__ in BASES and b.__module__.startswith("lightning.") for b in bases)
    if not (ours or theirs):
        raise InputError(f"{path}._target_: {name!r} names no part of the project; choose another")
    return found


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
            raise InputError(_with_path(where[1], str(cause))) from None
        raise cause or error from None


def _with_path(path: str, sentence: str) -> str:
    """A sentence about what stands at a config path, after the part of the path that it omits.

    >>> _with_path("methods.mine.drafter", "drafter.ranks: give more")
    'methods.mine: drafter.ranks: give more'
    """
    first = re.split(r"[.:]", sentence, maxsplit=1)[0]
    before, found, _ = f".{path}.".rpartition(f".{first}.")
    before = before[1:] if found else path
    return f"{before}: {sentence}" if before else sentence
