"""Controls of SPRINTER: they ask the target as often as it did on other prompts, but no verifier
says when."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq

from slipstream.evaluation.methods import Sprinter
from studies import Target


class Control(Sprinter):
    """SPRINTER without a verifier. settings: by prompt set the probability with which a token is
    kept, whatever it is, and the cap."""

    def __init__(self, draft: Target, settings: dict[str, tuple[float, int]]):
        super().__init__(draft, 1.0, max(cap for _, cap in settings.values()))
        self.of_set = settings

    def expect(self, prompt_set: str) -> None:
        self.decoder.kept, self.decoder.cap = self.of_set[prompt_set]
        self.details = f"keeps {self.decoder.kept:.1%}, runs of up to {self.decoder.cap}"


def calls_at_caps(lengths: Sequence[int], cap: int) -> int:
    """Calls for answers of `lengths` tokens whose runs end at the cap alone. The first token comes
    with the prefill; a call writes the one after `cap` others.

    >>> calls_at_caps([7, 4], 2)
    3
    """
    return sum((length - 1) // (cap + 1) for length in lengths)


def calls_by_chance(lengths: Sequence[int], keep: float, cap: int) -> float:
    """The expected number where each token is kept with probability `keep`, in runs of up to `cap`.

    >>> calls_by_chance([7, 4], 1.0, 2), calls_by_chance([7, 4], 0.0, 2)
    (3.0, 9.0)
    """
    kept = np.zeros(cap + 1)  # probabilities of so many tokens since the last call
    kept[0] = 1.0
    calls = [0.0]
    for _ in range(max(lengths) - 1):
        kept = np.append(0.0, kept[:-1] * keep)
        kept[0] = 1.0 - kept.sum()
        calls.append(calls[-1] + kept[0])
    return float(sum(calls[length - 1] for length in lengths))


def matched_cap(lengths: Sequence[int], calls: int) -> int:
    """The cap with which answers of `lengths` need a number of calls as near as can be."""
    return min(range(1, max(lengths) + 1), key=lambda cap: abs(calls_at_caps(lengths, cap) - calls))


def matched_keep(lengths: Sequence[int], calls: int, cap: int) -> float:
    """The probability with which the expected number is `calls`, 1 where the cap needs more.

    >>> round(calls_by_chance([7, 4], matched_keep([7, 4], 5, 3), 3), 6)
    5.0
    """
    if calls_by_chance(lengths, 1.0, cap) >= calls:
        return 1.0
    return float(brentq(lambda keep: calls_by_chance(lengths, keep, cap) - calls, 0.0, 1.0))
