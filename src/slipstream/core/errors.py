"""The one exception for bad input: its text names the field and the remedy in one sentence.

`train.py` and `infer.py` print it without a traceback and exit with code 2.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Something the user gave cannot be used; the message says what to change."""


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Within, an `InputError` names its field after the config `path` of what was built there; ""
    for what Python code built."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}" if path else str(error)) from error
