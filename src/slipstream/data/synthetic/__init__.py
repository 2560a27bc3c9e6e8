"""Prompts without completions, invented on the spot: for training a speculator on the target's own
answers where no prompts may be shipped.

Every prompt belongs to one split by a hash of its text, so prompts of different splits never
coincide, whatever seeds they were drawn with. It knows nothing of tokens or of the answers.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from slipstream.core.errors import InputError
from slipstream.data.rows import Row
from slipstream.data.synthetic import data_to_text, text_to_sql

KINDS: dict[str, Callable[[Random], str]] = {
    "data_to_text": data_to_text.draw_prompt,
    "text_to_sql": text_to_sql.draw_prompt,
}
SPLITS = {"train": range(90), "validation": range(90, 95), "test": range(95, 100)}


def split_of(prompt: str) -> str:
    """The split `prompt` belongs to: its SHA-256 hash modulo 100, see `SPLITS`."""
    remainder = int.from_bytes(hashlib.sha256(prompt.encode()).digest()) % 100
    return next(split for split, remainders in SPLITS.items() if remainder in remainders)


@dataclass(frozen=True)
class SyntheticPrompts:
    """Distinct invented prompts, the kinds in turn, the same for the same arguments.

    kinds: one or more of `data_to_text` and `text_to_sql`. count: of all kinds together; a smaller
    count gives the first rows of a larger one. split: train, validation or test.

    SyntheticPrompts(["data_to_text"], count=1, seed=0).rows() -> [Row(prompt="name[...], ...",
    completion="", source="data_to_text")]

    Raises `InputError` for an unknown kind or split, a kind given twice and a count below 1.
    """

    kinds: list[str]
    count: int
    seed: int
    split: str = "train"

    def __post_init__(self):
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise InputError(
                f"kinds: {list(self.kinds)} must name one or more of {', '.join(KINDS)}"
            )
        if len(set(self.kinds)) < len(self.kinds):
            raise InputError(f"kinds: {list(self.kinds)} names a kind twice; name it once")
        if self.split not in SPLITS:
            raise InputError(f"split: {self.split!r} must be one of {', '.join(SPLITS)}")
        if not isinstance(self.count, int) or self.count < 1:
            raise InputError(f"count: {self.count} prompts were asked for; give 1 or more")

    def rows(self) -> list[Row]:
        """The prompts as rows with empty completions; `source` is the kind."""
        draws = [(kind, Random(f"{kind} {self.seed}")) for kind in self.kinds]
        seen: set[str] = set()
        rows = []
        for index in range(self.count):
            kind, rng = draws[index % len(draws)]
            prompt = KINDS[kind](rng)
            while prompt in seen or split_of(prompt) != self.split:
                prompt = KINDS[kind](rng)
            seen.add(prompt)
            rows.append(Row(prompt, "", kind))
        return rows
