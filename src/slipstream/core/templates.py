"""Arguments of chat templates, such as `enable_thinking` of Qwen3."""

import math
import re
from collections.abc import Mapping

from slipstream.core.errors import InputError

Argument = bool | int | float | str
FIELD = "chat_template_kwargs"
"""What servers call them."""
TEXT = re.compile(r"[\w .,:+-]{0,64}")
"""Texts that spell no special token."""
RESERVED = "messages tools documents add_generation_prompt true false none".split()
"""Names that are not the caller's."""


def with_arguments(template: str, arguments: Mapping[str, Argument], field: str = FIELD) -> str:
    """The Jinja template in which these names have these values.

    `InputError`, which names `field`, for what is no name or no such value.

    >>> with_arguments("{{ mode }}", {"mode": "short"})
    "{% set mode = 'short' %}\\n{{ mode }}"
    """
    for name, value in arguments.items():
        known = isinstance(name, str) and name.isascii() and name.isidentifier()
        fits = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        fits = fits or (isinstance(value, str) and TEXT.fullmatch(value))
        if not known or name.lower() in RESERVED or not fits:
            raise InputError(
                f"{field}: {name!r} must be a name of the chat template's own, and its value true, "
                "false, a number or a short plain text"
            )
        # The line break after a block is left out.
        template = f"{{% set {name} = {value!r} %}}\n{template}"
    return template
