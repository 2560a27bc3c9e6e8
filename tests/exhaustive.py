"""Which cases of a large product `make test` runs: those that prove every thing once.

`make test-all` runs all of them.
"""

from collections.abc import Callable, Iterable

import pytest


def sparing(cases: Iterable[tuple], once: Callable[..., bool]) -> list:
    """All cases, those marked as exhaustive of which `once` does not hold."""
    return [
        case if once(*case) else pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases
    ]
