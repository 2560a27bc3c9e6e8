"""Where the time of a decode goes: exclusive shares, by name.

While an inner share is measured the outer one stands still, so shares add up to the whole. Times
are the host's; on an accelerator the one synchronisation of a step falls into the share that waits.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds per share, e.g. `with clock.share("verify"): ...`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._names: list[str] = []
        self._since = 0.0

    @contextmanager
    def share(self, name: str) -> Iterator[None]:
        """Count the time inside for `name`."""
        self._switch()
        self._names.append(name)
        try:
            yield
        finally:
            self._switch()
            self._names.pop()

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._names:
            self.seconds[self._names[-1]] += now - self._since
        self._since = now
