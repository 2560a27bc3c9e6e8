"""Slipstream trains learned speculators for large language models, and decodes with them.

>>> import slipstream
>>> answer = slipstream.generate("name[The Mill], eatType[pub], food[English]")  # doctest: +SKIP
"""

from slipstream.custom_generation import custom_generate
from slipstream.generation import generate

__all__ = ["custom_generate", "generate"]
