"""The one exception for bad input: its text names the field and the remedy in one sentence.

`train.py` and `infer.py` print it without a traceback and exit with code 2.
"""


class InputError(ValueError):
    """Something the user gave cannot be used; the message says what to change."""
