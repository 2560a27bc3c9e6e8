"""Chat templates that are given, and their arguments, such as `enable_thinking` of Qwen3."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

from slipstream.core.errors import InputError

Argument = bool | int | float | str
FIELD = "chat_template_kwargs"
"""What servers call them."""
NAME, TEXT = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII), re.compile(r"[\w .,:+-]{0,64}")
"""Names, and texts that spell no special token."""


def template_of(given: str | None) -> str | None:
    """A chat template, given as its text or as a file with it; `InputError` for neither."""
    if given is None or "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(
            f"target.chat_template: {given[:64]!r} is no file of text and no template, which would "
            "have {{ }} or {% %}; name a file with one, or give its text"
        ) from error


def check_arguments(arguments: Mapping[object, object], field: str = FIELD) -> None:
    """`InputError`, which names `field`, for what is no name or no value that may be told."""
    for name, value in arguments.items():
        fits = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        fits = fits or (isinstance(value, str) and TEXT.fullmatch(value))
        if not (isinstance(name, str) and NAME.fullmatch(name)) or not fits:
            raise InputError(
                f"{field}: {str(name)[:64]!r} must be a name that the chat template reads, and its "
                "value true, false, a number or a short plain text"
            )
