"""What tests of comparisons share."""

import pytest
from tests.tiny import reading_target


@pytest.fixture
def target():
    return reading_target()
