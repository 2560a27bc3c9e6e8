"""The speculator folder: config.json, model.safetensors (trained tensors only) and README.md; where
it drafts, also custom_generate/generate.py, with which transformers decodes.

A folder opens by its path or hub id alone, given the target it was trained for, and refuses any
other with one sentence. A half-written one never stands there.
"""

import json
import re
import shutil
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from pkgutil import resolve_name
from typing import TypeVar

import safetensors
import safetensors.torch
import torch
from torch.utils._pytree import tree_leaves

from slipstream.assets import locate
from slipstream.core.errors import SPECULATOR, InputError, first_sentence, what_is
from slipstream.core.files import SUMS, check_writable, is_intact, replaced_folder
from slipstream.core.templates import FIELD
from slipstream.core.version import VERSION
from slipstream.speculators.base import (
    DraftingSpeculator,
    Speculator,
    known_kinds,
    speculator_class,
)
from slipstream.targets.target import Target

Kind = TypeVar("Kind", bound=Speculator)
FORMAT_VERSION = 1
FIELDS = ("format_version", "kind", "arguments", "target", "target_fingerprint")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
GENERATE = "custom_generate/generate.py"
"""Where transformers looks for another way to generate; the same in every folder."""
PARTS = [CONFIG, WEIGHTS, CARD, GENERATE, SUMS]


def save_speculator(
    folder: str | Path, speculator: Speculator, target: Target, trained_length: int, card: str
) -> Path:
    """Write the folder (replacing one of the same name). trained_length: longest sample, tokens."""
    folder = Path(folder)
    config = {
        "format_version": FORMAT_VERSION,
        "kind": speculator.kind,
        "arguments": asdict(speculator.config),
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "chat_template": getattr(target.tokenizer, "chat_template", None),
        FIELD: getattr(target.tokenizer, FIELD, None) or {},
        "trained_length": trained_length,
        "slipstream_version": VERSION,
    }
    check_writable(folder.parent, "output_dir")
    check_replaceable(folder)
    with replaced_folder(folder) as made:
        (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensors = {name: tensor.contiguous() for name, tensor in speculator.state_dict().items()}
        safetensors.torch.save_file(tensors, made / WEIGHTS)
        (made / CARD).write_text(card, encoding="utf-8")
        if isinstance(speculator, DraftingSpeculator):
            (made / GENERATE).parent.mkdir()
            shutil.copy(located("slipstream/small-streaming") / GENERATE, made / GENERATE)
    return folder


def located(name: str | PathLike) -> Path:
    """The folder of the speculator called `name`: a path, a shipped one, or, where there is no such
    folder, a hub id (OWNER/NAME), which is downloaded; `InputError` where that fails."""
    folder = Path(locate(name))
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=PARTS))
    except (OSError, ValueError) as error:  # ours, theirs and those of requests are such
        raise InputError(
            f"speculator: {name} is no folder here and cannot be fetched from the hub "
            f"({first_sentence(error)}); give a folder written by train.py, or the OWNER/NAME of "
            "an uploaded one"
        ) from error


def read_config(folder: str | Path) -> dict:
    """The folder's config.json; `InputError` when it is missing or of another format."""
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        version, kind, arguments, target, prints = (config[name] for name in FIELDS)
        if not isinstance(arguments, dict) or not isinstance(prints, dict):
            raise TypeError("no mapping")
        texts = *prints.values(), "" if target is None else target
        if not all(isinstance(each, str) for each in texts):
            raise TypeError("no text")
        if not isinstance(config.get("trained_length", 0), int):
            raise TypeError("no number")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        seen = what_is(folder)
        unread = f"{path} cannot be read ({type(error).__name__})"
        seen = unread if seen in ("", SPECULATOR) else f"{folder} is {seen}"
        raise InputError(
            f"speculator: {seen}; give the folder of a speculator that train.py has written"
        ) from error
    if version != FORMAT_VERSION or kind not in list(known_kinds()):
        raise InputError(
            f"speculator: {folder} has format {version!r} and kind {kind!r}; this version opens "
            f"format {FORMAT_VERSION} and kinds {', '.join(known_kinds())}; of others "
            "install the package"
        )
    return config


def load_speculator(folder: str | PathLike, target: Target) -> Speculator:
    """Open a speculator folder for `target`. Raises `InputError` for another target or tokenizer,
    and for missing, superfluous, misshapen, unreadable or not finite tensors."""
    folder = located(folder)
    config = read_config(folder)
    theirs, ours = config["target_fingerprint"], target.fingerprint
    differs = {part for part in theirs | ours if theirs.get(part) != ours.get(part)}
    if target.tokenizer is None:  # token ids come from outside: there is nothing to compare
        differs.discard("tokenizer")
    if "quantization" in differs:
        kind = theirs.get("quantization")
        raise InputError(
            f"speculator: {folder} was trained for a target with {kind or 'unquantised'} weights; "
            f"set target.quantization={kind or 'null'}, or train a speculator for this one"
        )
    for name in ("chat_template", FIELD) if differs == {"tokenizer"} else ():
        if (config.get(name) or {}) != (getattr(target.tokenizer, name, None) or {}):
            raise InputError(
                f"speculator: {folder} was trained with another {name} than this target has; open "
                f"it with target.{name}= (from Python, load_target(..., {name}=...)) as "
                f"{folder / CONFIG} says"
            )
    if differs:
        differ = f"differ{'s' * (differs in ({'config'}, {'tokenizer'}))}"
        remedy = "use that target, or train a speculator for this one"
        if folder.parent == located("slipstream/small-target").parent:  # which nobody named
            remedy = (
                "name your own (speculator_path=, drafter= in Python), or drafter=prompt_lookup"
            )
        raise InputError(
            f"speculator: {folder} was trained for {config['target'] or 'another target'} and "
            f"the {' and '.join(sorted(differs))} of {target.name or 'this target'} "
            f"{differ}; {remedy}"
        )
    kind, path = speculator_class(config["kind"]), folder / WEIGHTS
    tensors = _read_tensors(path)
    sizes = (size for each in tensors.values() for size in each.shape)
    largest = max([target.max_positions, *sizes])
    try:
        for each in tree_leaves(config["arguments"]):  # before so much memory is allocated
            if isinstance(each, int) and each > largest:
                raise InputError(f"{each} is more than any size of its tensors and the target")
        with torch.random.fork_rng(devices=[]):  # what it begins with is replaced
            speculator = kind(target, kind.Config.from_arguments(config["arguments"]))
    except Exception as error:  # of what others wrote, anything can be wrong
        raise InputError(
            f"speculator: the arguments in {folder / CONFIG} are not those of this version "
            f"({first_sentence(error)}); copy or train it again"
        ) from error
    own = speculator.state_dict()
    for name in sorted(own.keys() | tensors.keys()):
        expected, found = (
            f"shape {tuple(each[name].shape)}" if name in each else "none"
            for each in (own, tensors)
        )
        if expected != found:
            raise InputError(
                f"speculator: {path} does not fit its config.json at tensor {name!r} (expected "
                f"{expected}, found {found}); copy it again"
            )
    _check_intact(folder / CONFIG)
    speculator.load_state_dict(tensors)
    speculator.trained_length = config.get("trained_length")
    return speculator.to(target.device).eval()


def opened(
    given: Kind | str | PathLike, target: Target, expected: type[Kind], field: str = "speculator"
) -> Kind:
    """The speculator itself, or that of a folder; `InputError` for what is none of this kind.

    field: of the config that names it.
    """
    speculator = load_speculator(given, target) if isinstance(given, str | PathLike) else given
    if not isinstance(speculator, expected):
        kind = getattr(speculator, "kind", type(speculator).__name__)
        raise InputError(
            f"{field}: a speculator of kind {kind!r} is no {expected.title}; name a folder that "
            f"train.py speculator={expected.kind} wrote, or decode with the drafter of its kind"
        )
    return speculator


def start_from_speculator(speculator: Speculator, folder: str | Path) -> None:
    """Take over the tensors of a speculator folder that `speculator` has in the same shape.

    The folder's target is not compared: one of the same sizes, retrained, is a good start, too.
    Raises `InputError` when the folder cannot be read or shares none.
    """
    folder = located(folder)
    read_config(folder)
    tensors, own = _read_tensors(folder / WEIGHTS), speculator.state_dict()
    same = [name for name in own.keys() & tensors if own[name].shape == tensors[name].shape]
    if not same:
        raise InputError(
            f"training.start_from: {folder} shares no tensor with the speculator to be trained; "
            "give a folder of the same target and speculator.* settings, or null"
        )
    speculator.load_state_dict({name: tensors[name] for name in same}, strict=False)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a speculator folder; `InputError` where they are no finite numbers."""
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(
            f"speculator: {path} is missing or corrupt ({error}); copy or train it again"
        ) from error
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            wrong = f"{str(tensor.dtype).removeprefix('torch.')} numbers"
        elif not tensor.isfinite().all():
            wrong = "NaN or infinity"
        else:
            continue
        raise InputError(
            f"speculator: {path} has {wrong} in tensor {name!r}; copy or train it again"
        )
    _check_intact(path)
    return tensors


def _check_intact(path: Path) -> None:
    if not is_intact(path):
        raise InputError(
            f"speculator: {path} is not what was written (its checksum in {SUMS} is another); "
            "copy or train it again"
        )


def check_replaceable(folder: Path) -> None:
    """`InputError` unless nothing stands there, an empty folder, or a speculator of ours."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        read_config(folder)
    except InputError as error:
        raise InputError(
            f"output_dir: {folder} holds something that is no speculator; choose another folder"
        ) from error


def from_pretrained(name: str | Path):
    """A drafter with the speculator called `name`: a folder, a hub id, or one that ships.

    Its settings are those with which training measured tau. Raises `InputError` for what is no
    folder of a speculator that drafts.
    """
    kind = speculator_class(read_config(located(name))["kind"])
    if not issubclass(kind, DraftingSpeculator):
        raise InputError(
            f"speculator: {name} holds a speculator of kind {kind.kind!r}, which does not draft; "
            "give one that train.py wrote with speculator=streaming or speculator=medusa"
        )
    return resolve_name(kind.drafter_class)(name)


def push_to_hub(folder: str | Path, repo_id: str, private: bool | None = None) -> str:
    """Upload the speculator in `folder` to the hub as `repo_id` (OWNER/NAME), made if missing;
    returns its address.

    private: whether a new one is, None for the owner's default. Raises `InputError` for a folder
    that is no speculator, and where the hub does not take it.
    """
    from huggingface_hub import HfApi

    folder, api = located(folder), HfApi()
    read_config(folder)
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message="Upload with Slipstream"
        )
    except Exception as error:  # of a network, anything can be wrong
        raise InputError(
            f"repo_id: {folder} cannot be uploaded as {repo_id!r} ({first_sentence(error)}); log "
            "in with hf auth login, and give OWNER/NAME of a place where you may write"
        ) from error
    return str(address)
