"""Slipstream trains learned speculators for large language models, and decodes with them.

>>> import slipstream
>>> answer = slipstream.generate("name[The Mill], eatType[pub], food[English]")  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.custom_generation import custom_generate
    from slipstream.generation import chat, generate, stream
    from slipstream.speculators.checkpoint import from_pretrained, push_to_hub

__all__ = ["chat", "custom_generate", "from_pretrained", "generate", "push_to_hub", "stream"]
_MODULES = {"custom_generate": "slipstream.custom_generation"}
_MODULES |= dict.fromkeys(["chat", "generate", "stream"], "slipstream.generation")
_MODULES |= dict.fromkeys(["from_pretrained", "push_to_hub"], "slipstream.speculators.checkpoint")


def __getattr__(name: str) -> object:
    """What the package offers is imported when it is asked for: parts of it need less."""
    if name not in _MODULES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
