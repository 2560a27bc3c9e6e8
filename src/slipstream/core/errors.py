"""The one exception for bad input: its text names the field and the remedy in one sentence.

`train.py` and `infer.py` print it without a traceback and exit with code 2.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Something the user gave cannot be used; the message says what to change."""


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Within, an `InputError` has the config `path` of what is built there before the field it
    names; "" for what Python code builds."""
    try:
        yield
    except InputError as error:
        if not path or str(error).startswith(path):
            raise
        raise InputError(f"{path}: {error}") from error
