"""Settings as dataclasses whose fields say what they may be, checked when they are made.

A YAML mirrors one such class. What concerns several fields, the class checks after them.
"""

import operator
from dataclasses import MISSING, field, fields
from functools import partial
from math import isfinite
from typing import ClassVar

from slipstream.core.errors import InputError

BOUNDS = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def number(default=MISSING, whole: bool = False, null: bool = False, **bounds: float):
    """A field: a finite number, or a `whole` one; null: or None; bounds: by names in `BOUNDS`."""
    kind = f"a {'whole' if whole else 'finite'} number"
    named = " and ".join(f"{BOUNDS[name][0]} {bound}" for name, bound in bounds.items())
    expected = ", ".join([kind, *([named] if named else []), *(["or null"] if null else [])])

    def allows(value: object) -> bool:
        if value is None:
            return null
        is_number = isinstance(value, int if whole else int | float) and type(value) is not bool
        within = (BOUNDS[name][1](value, bound) for name, bound in bounds.items())
        return is_number and isfinite(value) and all(within)

    return field(default=default, metadata={"allows": allows, "expected": expected})


whole = partial(number, whole=True)


def one_of(*choices, default=MISSING):
    """A field: one of these."""
    expected = f"one of {', '.join(map(str, choices))}"
    allows = {"allows": lambda value: value in choices, "expected": expected}
    return field(default=default, metadata=allows)


class Settings:
    """Base of dataclasses with such fields. section: of the config, which errors name.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Tree(Settings):
    ...     section = "tree"
    ...     top_k: int = whole(least=1)
    >>> Tree(0)
    Traceback (most recent call last):
    slipstream.core.errors.InputError: tree.top_k: must be a whole number, at least 1
    """

    section: ClassVar[str]

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.metadata and not each.metadata["allows"](getattr(self, each.name)):
                expected = each.metadata["expected"]
                raise InputError(f"{self.section}.{each.name}: must be {expected}")
