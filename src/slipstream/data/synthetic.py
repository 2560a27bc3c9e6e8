"""Prompts without completions that ship with the package: for training a speculator on the target's
own answers where no other prompts are at hand.

`tools/synthetic` invented them. No prompt is of two splits. It knows nothing of tokens or answers.
"""

from dataclasses import dataclass
from random import Random

from slipstream.assets import PROMPTS
from slipstream.core.errors import InputError
from slipstream.data.rows import Row, read_rows

KINDS = ("data_to_text", "text_to_sql")
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class SyntheticPrompts:
    """Distinct shipped prompts, the kinds in turn, the same for the same arguments.

    kinds: one or more of `KINDS`. count: of all kinds together; a smaller count gives the first
    rows of a larger one. seed: 0 gives them in the order of their invention, others shuffle them.
    split: train, validation or test.

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
        """The prompts as rows with empty completions; `source` is the kind. Raises `InputError`
        for more than ship."""
        share = -(-self.count // len(self.kinds))
        tables = [self._rows_of(kind, share) for kind in self.kinds]
        return [row for rows in zip(*tables, strict=True) for row in rows][: self.count]

    def _rows_of(self, kind: str, count: int) -> list[Row]:
        rows = read_rows(PROMPTS / kind, self.split, completion_required=False)
        if count > len(rows):
            raise InputError(
                f"count: {count} {kind} prompts of the {self.split} split were asked for, and "
                f"{len(rows)} ship with the package; ask for fewer, or write more with "
                f"`python -m tools.synthetic --{self.split} {count}` in a checkout"
            )
        if self.seed:
            Random(f"{kind} {self.seed}").shuffle(rows)
        return rows[:count]
