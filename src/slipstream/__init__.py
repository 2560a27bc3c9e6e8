"""Slipstream trains learned speculators for large language models, and decodes with them.

>>> import slipstream
>>> answer = slipstream.generate("name[The Mill], eatType[pub], food[English]")  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.custom_generation import custom_generate
    from slipstream.generation import generate

__all__ = ["custom_generate", "generate"]
_MODULES = {"custom_generate": "slipstream.custom_generation", "generate": "slipstream.generation"}


def __getattr__(name: str) -> object:
    """What the package offers is imported when it is asked for: parts of it need less."""
    if name not in _MODULES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
