"""What all training modules ask of the numbers they are given."""

import math

from slipstream.core.errors import InputError


def check_numbers(**numbers: float | list[float] | None) -> None:
    """`InputError` for settings of `training` that are no finite numbers of at least 0; of lists
    each number counts, and None is none."""
    for name, given in numbers.items():
        for number in given if isinstance(given, list | tuple) else [given]:
            valid = isinstance(number, int | float) and math.isfinite(number) and number >= 0
            if number is not None and not valid:
                raise InputError(
                    f"training.{name}: {number!r} is no finite number of at least 0; give one"
                )
