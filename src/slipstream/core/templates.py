"""Chat templates with arguments of their own, such as `enable_thinking` of Qwen3."""

from collections.abc import Mapping

from slipstream.core.errors import InputError

Argument = bool | int | float | str


def with_arguments(template: str, arguments: Mapping[str, Argument], field: str) -> str:
    """The Jinja template in which these names have these values.

    `InputError`, which names `field`, for what is no name or no such value.

    >>> with_arguments("{{ mode }}", {"mode": "short"}, "kwargs")
    "{% set mode = 'short' %}\\n{{ mode }}"
    """
    for name, value in arguments.items():
        if not (name.isascii() and name.isidentifier()) or not isinstance(value, Argument):
            raise InputError(
                f"{field}: {name!r} must be a name that the chat template knows, with true, false, "
                "a number or a text"
            )
        # The line break after a block is left out.
        template = f"{{% set {name} = {value!r} %}}\n{template}"
    return template
