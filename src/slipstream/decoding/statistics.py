"""Counts and times of decoding, from which every reported rate is made."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LOW_TAU = 1.05
"""Below it drafting is of no use."""


@dataclass
class Statistics:
    """One answer, or the sum of several.

    tokens: emitted, the end token included; target_forwards: after prefill; tokens after prefill
    are those beyond the first of each answer; target_rows: positions that these forwards worked
    on; drafted: emitted tokens that had been drafted. seconds: of the whole call, prefill included;
    shares: seconds of prefill, draft and verify (the rest is overhead).
    """

    answers: int = 0
    tokens: int = 0
    target_forwards: int = 0
    seconds: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    target_rows: int = 0
    drafted: int = 0

    def __add__(self, other: "Statistics") -> "Statistics":
        ours, theirs = dict(vars(self)), dict(vars(other))
        shares = Counter(ours.pop("shares"))
        shares.update(theirs.pop("shares"))
        return Statistics(**{name: ours[name] + theirs[name] for name in ours}, shares=dict(shares))

    @property
    def tau(self) -> float:
        """Tokens per target forward, bonus token included; plain decoding has 1.00, and so have
        answers of one token, which the prefill decides."""
        if self.tokens == self.answers and not self.target_forwards:
            return 1.0
        return (self.tokens - self.answers) / max(1, self.target_forwards)

    @property
    def mean_accepted_draft_tokens(self) -> float:
        """Drafted tokens kept per target forward, the last token of an answer included."""
        return self.drafted / max(1, self.target_forwards)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, drafting included, the prefill left out."""
        return (self.seconds - self.shares.get("prefill", 0.0)) / max(1, self.target_forwards)

    @property
    def overhead(self) -> float:
        """Seconds that no forward accounts for."""
        return self.seconds - sum(self.shares.values())


class Clock:
    """Seconds per share, e.g. `with clock.share("verify"): ...`: while an inner share is measured,
    the outer one stands still. Times are the host's; on an accelerator the one synchronisation of
    a step falls into the share that waits."""

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
