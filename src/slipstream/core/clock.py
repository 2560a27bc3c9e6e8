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
        self._within = 0.0  # of the shares that were measured within the present one

    @contextmanager
    def share(self, name: str) -> Iterator[None]:
        """Count the time inside for `name`."""
        before, self._within, started = self._within, 0.0, time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.seconds[name] += seconds - self._within
            self._within = before + seconds
