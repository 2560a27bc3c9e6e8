"""Whether steps still take the time that was calibrated."""

from collections.abc import Callable

from slipstream.decoding.statistics import Statistics

DRIFT = 0.25
"""A step that takes this much more or less time than when it was calibrated is reported."""
STEPS_TO_JUDGE = 64


class Drift:
    """Notices, once, that some `STEPS_TO_JUDGE` steps took another time than was calibrated."""

    def __init__(self, expected: float, say: Callable[[str], None] = print):
        self.expected, self.say = expected, say
        self.recent, self.noticed = Statistics(), False

    def watch(self, statistics: list[Statistics]) -> None:
        self.recent = sum(statistics, self.recent)
        if self.noticed or self.recent.target_forwards < STEPS_TO_JUDGE:
            return
        seconds, self.recent = self.recent.step_seconds, Statistics()
        change = seconds / self.expected - 1
        if abs(change) > DRIFT:
            self.noticed = True
            self.say(
                f"note: a step takes {1000 * seconds:.1f} ms, {abs(change):.0%} "
                f"{'more' if change > 0 else 'less'} than when it was calibrated; run with "
                "calibrate=true again"
            )
