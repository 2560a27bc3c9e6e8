"""SPRINTER's controls, without a verifier: the draft model alone, a cap alone, doubts at random.

What a verifier knows shows beside them alone: they ask the target as often, whatever was written.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq

from slipstream.core.errors import InputError
from slipstream.decoding.answer import Limits
from slipstream.evaluation.comparison import Run, total_of
from slipstream.evaluation.methods import Method, Sprinter
from slipstream.evaluation.prompts import places_by_set
from studies import Prompt, Target


def at_random(point: str) -> str:
    """What the control of a point is called that doubts at random as often."""
    return f"random_{point.removeprefix('sprinter_')}"


def controls_of(
    draft: Target,
    tries: dict[str, Run],
    chosen: str,
    prompts: list[Prompt],
    longest: int,
    limits: Limits,
) -> dict[str, Method]:
    """The draft model alone (after the first token), a cap alone, and doubts at random for each of
    SPRINTER's points in `tries`."""
    settings: dict[str, dict[str, tuple[float, int]]] = {"control_draft": {}, "control_cap": {}}
    for name, run in tries.items():
        random = settings[at_random(name)] = {}
        for task, places in places_by_set(prompts).items():
            lengths = [len(run.generations[place].ids) for place in places]
            calls = total_of(run, places).target_forwards
            random[task] = matched_keep(lengths, calls, longest), longest
            if name == chosen:
                settings["control_draft"][task] = 1.0, limits.max_new_tokens
                settings["control_cap"][task] = 1.0, matched_cap(lengths, calls)
    return {name: Control(draft, of_set) for name, of_set in settings.items()}


class Control(Sprinter):
    """SPRINTER without a verifier: it asks the target as often, but nobody says when. settings: by
    prompt set the probability with which a token is kept, whatever it is, and the cap."""

    def __init__(self, draft: Target, settings: dict[str, tuple[float, int]]):
        super().__init__(draft, 1.0, max(cap for _, cap in settings.values()))
        self.of_set = settings

    def expect(self, prompt_set: str) -> None:
        if prompt_set not in self.of_set:
            raise InputError(f"study.calibration_prompts: none is of {prompt_set}; give more")
        self.decoder.kept, self.decoder.cap = self.of_set[prompt_set]
        self.details = f"keeps {self.decoder.kept:.1%}, runs of up to {self.decoder.cap}"


def calls_by_chance(lengths: Sequence[int], keep: float, cap: int) -> float:
    """The expected number of calls for answers of `lengths` tokens, where each token is kept with
    probability `keep`, in runs of up to `cap`. The first token comes with the prefill; a call
    writes the one after a run.

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
    caps = range(1, max(lengths) + 1)
    return min(caps, key=lambda cap: abs(calls_by_chance(lengths, 1.0, cap) - calls))


def matched_keep(lengths: Sequence[int], calls: int, cap: int) -> float:
    """The probability with which the expected number is `calls`, 1 where the cap needs more.

    >>> round(calls_by_chance([7, 4], matched_keep([7, 4], 5, 3), 3), 6)
    5.0
    """
    if calls_by_chance(lengths, 1.0, cap) >= calls:
        return 1.0
    return float(brentq(lambda keep: calls_by_chance(lengths, keep, cap) - calls, 0.0, 1.0))
