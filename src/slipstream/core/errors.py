"""The one exception for bad input: its text names the field and the remedy in one sentence.

`train.py`, `infer.py` and `serve.py` print it without a traceback and exit with code 2.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LANGUAGE_MODEL = "a language model, which target.name= or draft= takes"
SPECULATOR = "a speculator, which speculator_path= takes"


class InputError(ValueError):
    """Something the user gave cannot be used; the message says what to change."""


def first_sentence(error: Exception) -> str:
    """The first sentence of another library's error, without a full stop; its type if it is empty.

    >>> first_sentence(OSError("401 Client Error. (Request ID: 5)"))
    '401 Client Error'
    """
    said = re.split(r"[.!]\s|\n", str(error).strip())[0].rstrip(".!:")
    return said or type(error).__name__


def what_is(path: str | Path) -> str:
    """What a folder or file is, of those that are taken for one another, and which setting takes
    it; "" for others."""
    path = Path(path)
    with suppress(OSError, ValueError, RecursionError):  # of what is no path, or cannot be read
        if path.suffix == ".ckpt" and path.is_file():
            return "a checkpoint, which resume= goes on from"
        if (path / "adapter_config.json").is_file():
            return "an adapter, which target.adapter= takes"
        if (path / "model" / "config.json").is_file():
            return f"the folder of a run, whose model is in {path / 'model'}"
        content = json.loads((path / "config.json").read_text(encoding="utf-8"))
        for key, kind in {"target_fingerprint": SPECULATOR, "model_type": LANGUAGE_MODEL}.items():
            if isinstance(content, dict) and key in content:
                return kind
    return ""


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Within, the text of an `InputError` gets `path` put before it: the config path of the part
    that is being built, "" for parts that Python code builds."""
    try:
        yield
    except InputError as error:
        if not path or str(error).startswith(path):
            raise
        raise InputError(f"{path}: {error}") from error


def out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch says that there is no memory left: its allocator on a device by an error of
    its own, on a CPU, and CUDA itself (for a graph), by a sentence."""
    import torch

    told = (
        "DefaultCPUAllocator: can't allocate memory",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, torch.OutOfMemoryError) or any(each in str(error) for each in told)


def device_lost(error: BaseException) -> bool:
    """Whether CUDA says that something went wrong on the device after which all calls of this
    process fail."""
    told = (
        "illegal memory access", "illegal instruction", "illegal address", "misaligned address",
        "device-side assert", "unspecified launch failure", "uncorrectable", "hardware stack error",
    )  # fmt: skip
    return "CUDA error" in str(error) and any(each in str(error) for each in told)


@contextmanager
def enough_memory(field: str, remedy: str) -> Iterator[None]:
    """Within, memory that runs out is an `InputError` that names `field` and says what to do."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise InputError(f"{field}: out of memory; {remedy}") from error
