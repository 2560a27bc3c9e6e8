"""What tests of studies share."""

import pytest
from tests.tiny import tiny_target, tiny_tokenizer


def reading_target():
    """A tiny target that reads and writes text."""
    target = tiny_target()
    target.tokenizer = tiny_tokenizer()
    return target


@pytest.fixture
def target():
    return reading_target()
