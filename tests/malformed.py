"""Malformed configs, made of conf/ and of signatures: a new key is covered without an edit.

What an argument takes is read off its annotation here once more, by kinds alone, so that the table
does not ask the check that it tests.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from types import NoneType
from typing import Annotated, Literal, get_args, get_origin

from annotated_types import Ge, Len
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from tests.commands import ROOT, config_of

from slipstream.commands import Infer
from slipstream.configuration import own_part
from slipstream.core.settings import NARROWED
from slipstream.serving.server import Serve
from slipstream.training.command import Train

SCHEMAS = {"train": Train, "infer": Infer, "serve": Serve}
GIVEN = {  # what has no value of its own
    "adaptive": ["length=heuristic"],
    "application": [
        "methods.baseline.target.adapter=a", "methods.lossless.target.adapter=a",
        "methods.lossless.drafter.speculator=a", "methods.shared.drafter.speculator=a",
    ],
    "medusa": ["methods.medusa.drafter.speculator=a"],
    "hub": ["target.name=a"],
}  # fmt: skip
GROUPS = {
    "train": ("speculator", "training", "trainer", "logger", "data", "hub", "target", "debug"),
    "infer": ("drafter", "methods", "study", "hub", "length"),
    "serve": ("length",),
}
DELETED = object()


def compositions(command: str) -> Iterator[tuple[str, ...]]:
    """Overrides for every file of conf/ that a command takes."""
    yield ()
    for group in GROUPS[command]:
        for path in sorted((ROOT / "conf" / group).glob("*.yaml")):
            name = path.stem
            more = [] if group in ("drafter",) and name == "medusa" else GIVEN.get(name, [])
            if group == "training":
                more = ["speculator=sprinter"] if name == "verifier" else []
            if name in ("prompts", "language_model", "fine_tuning"):
                continue  # data of infer.py; below as experiments
            if group == "length":
                more = ["drafter=adaptive"]
            elif group == "methods" and name == "application":
                more = GIVEN["application"]
            elif group == "speculator" and name in ("sprinter", "acceptance"):
                more = ["training=verifier"]
            elif group != "methods" and name in ("medusa", "application"):
                more = []
            yield (f"{group}={name}", *more)
    if command == "train":
        yield ("experiment=small_draft",)
        yield ("experiment=fine_tuning",)
        yield ("experiment=sprinter_small",)


def composed(command: str, overrides: Sequence[str], output: str) -> DictConfig:
    config = config_of(command, *overrides, f"output_dir={output}")
    other = "infer" if command == "train" else "train"
    return own_part(config, SCHEMAS[command], SCHEMAS[other])


def malformed(
    command: str, config: DictConfig, seen: set[tuple[object, str]]
) -> Iterator[tuple[str, object]]:
    """Key and value, each of which spoils a good config; seen: arguments that had their turn."""
    content = OmegaConf.to_container(config, resolve=True)
    for component, key, name, annotation, required in arguments(SCHEMAS[command], content, ""):
        if (component, name) in seen:
            continue
        seen.add((component, name))
        for value in spoiling(annotation):
            yield key, value
        if required:
            yield key, DELETED
        yield f"{key}_", 1  # a misspelt name


def arguments(
    component: object, node: Mapping, path: str
) -> Iterator[tuple[object, str, str, object, bool]]:
    """Of all constructors named below a node: config path, name, annotation, whether required."""
    parameters = {} if component is None else signature(component).parameters
    for name, value in node.items():
        key = f"{path}.{name}" if path else name
        if name in parameters:
            told = NARROWED.get(component, {}).get(name, parameters[name].annotation)
            yield component, key, name, told, parameters[name].default is parameters[name].empty
        if isinstance(value, Mapping):
            inner = get_object(value["_target_"]) if "_target_" in value else None
            if key == "engine":
                inner = parameters[name].annotation
            yield from arguments(inner, value, key)


def kinds(annotation: object) -> list[tuple[object, list]]:
    """The plain types that an annotation takes, each with its bounds; a literal by its values."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return [(kind, [*bounds, *inner[1:]]) for kind, bounds in kinds(inner[0])]
    if origin is Literal:
        return [(Literal, list(inner))]
    if isinstance(origin, type) and issubclass(origin, Sequence | Mapping):
        return [(Mapping if issubclass(origin, Mapping) else Sequence, [])]
    if inner:
        return [each for part in inner for each in kinds(part)]
    return [(Mapping if annotation is dict else annotation, [])]


def spoiling(annotation: object) -> Iterator[object]:
    """Values that it does not take: of another kind, null, out of range."""
    known = kinds(annotation)
    taken = {kind for kind, _ in known}
    numbers = {int, float} & taken
    bounded = all(any(type(bound) is Ge for bound in own) for kind, own in known if kind in numbers)
    yield from (math.nan, math.inf, -math.inf)
    yield from [None] * (NoneType not in taken)
    yield from [True] * (bool not in taken)
    yield from [1.5] * (float not in taken)
    yield from [-(10**20)] * (not numbers or bounded)
    yield from ["some words"] * (str not in taken)
    yield from [{"odd": {}}] * (Mapping not in taken)
    yield from [[[]]] * (Sequence not in taken or not nests(annotation))
    for kind, bounds in known:
        if kind in (str, Sequence) and any(type(bound) is Len for bound in bounds):
            yield "" if kind is str else []
        if numbers == {kind}:
            step = 1 if kind is int else 1e-6
            for name, off in (("ge", -step), ("le", step), ("gt", 0), ("lt", 0)):
                yield from [getattr(bound, name) + off for bound in bounds if hasattr(bound, name)]


def nests(annotation: object) -> bool:
    """Whether it takes lists of lists."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return Sequence in {kind for kind, _ in kinds(inner[0])}
    return any(map(nests, inner[:1] if origin is Annotated else inner))


def spoiled(config: DictConfig, key: str, value: object) -> DictConfig:
    config = OmegaConf.create(OmegaConf.to_container(config))  # without flags
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    if value is DELETED:
        del node[name]
    else:
        OmegaConf.update(config, key, value, merge=False)
    return config
