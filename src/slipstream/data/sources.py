"""Where rows come from: local files, else data sets of the hub, else the prompts that ship; and
rows that ask for a text to be repeated."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Literal

from slipstream.assets import PROMPTS
from slipstream.core.errors import InputError
from slipstream.core.settings import Len, Seed, Text
from slipstream.data.hub import HubSource, TextSource
from slipstream.data.rows import Row, check_there, read_rows, text_of

KINDS = ("data_to_text", "text_to_sql")
FORMS = {"Repeat": str, "Repeat in lower case": str.lower, "Repeat with capitals": str.title}
Paths = Text | Path | Annotated[Sequence[Text | Path], Len(1)] | None
HubSets = dict[str, HubSource | TextSource] | None
Kinds = Sequence[Literal[KINDS]] | None


class Sources:
    """path: local file or folder, or a list of them; wins over the others. hub: data sets on the
    hub, by name. synthetic_kinds: kinds of shipped prompts, used when neither is given, in an order
    that `seed` chooses. Raises `InputError` where nothing is given."""

    def __init__(self, path: Paths, hub: HubSets, synthetic_kinds: Kinds, seed: Seed):
        self.paths = [path] if isinstance(path, str | Path) else list(path or [])
        self.hub = list((hub or {}).values())
        self.kinds, self.seed = list(synthetic_kinds or []), seed
        if not (self.paths or self.hub or self.kinds):
            raise InputError("data.path: no data given; name a JSONL file or folder")
        for each in self.paths:  # before a model is loaded
            check_there(each)

    @property
    def given(self) -> bool:
        """Whether the rows are of files or data sets, not prompts that ship."""
        return bool(self.paths or self.hub)

    def tables(self, split: str, completion_required: bool = True) -> list[list[Row]]:
        """The rows of each file or data set."""
        if self.paths:
            return [read_rows(path, split, completion_required) for path in self.paths]
        return [source.rows(split, completion_required) for source in self.hub]

    def synthetic(self, count: int | None, split: str) -> list[Row]:
        """`count` distinct prompts without completions that ship with the package, of all kinds
        together, in turn; `tools/synthetic` invented them. No prompt is of two splits.

        A smaller count gives the first rows of a larger one. Seed 0 gives them in the order of
        their invention, others shuffle them. Raises `InputError` for an unknown kind, none, or one
        given twice, and a count below 1 or of more than ship.

        >>> sources = Sources(None, None, ["data_to_text", "text_to_sql"], seed=0)
        >>> [row.source for row in sources.synthetic(3, "train")]
        ['data_to_text', 'text_to_sql', 'data_to_text']
        """
        kinds = self.kinds
        if not kinds or not set(kinds) <= set(KINDS):
            raise InputError(
                f"data.synthetic_kinds: {kinds} must name one or more of {', '.join(KINDS)}"
            )
        if len(set(kinds)) < len(kinds):
            raise InputError(f"data.synthetic_kinds: {kinds} names a kind twice; name it once")
        if count is None or count < 1:
            raise InputError(
                f"data.max_train_rows, corpus.max_rows, num_prompts: {count} prompts were asked "
                "for; give 1 or more"
            )
        tables, share = [], -(-count // len(kinds))
        for kind in kinds:
            rows = read_rows(PROMPTS / kind, split, completion_required=False)
            if share > len(rows):
                raise InputError(
                    "data.max_train_rows, data.generated_rows, corpus.max_rows, num_prompts: "
                    f"{share} {kind} prompts of the {split} split were asked for, and {len(rows)} "
                    "ship with the package; ask for fewer, or write more with `python -m "
                    f"tools.synthetic --{split} {share}` in a checkout"
                )
            if self.seed:
                Random(f"{kind} {self.seed}").shuffle(rows)
            tables.append(rows[:share])
        return [row for rows in zip(*tables, strict=True) for row in rows][:count]


def copying_rows(rows: list[Row], count: int, seed: int) -> list[Row]:
    """`count` rows of 3 to 20 random words of the prompts of `rows`, to be repeated in some form. A
    model trained from scratch on few tokens learns slowly to carry names and values from its prompt
    into its answer; words in no order that could be guessed leave copying as the only way.

    Example: "Repeat in lower case: Redwood has area[riverside]," -> "redwood has area[riverside],".
    """
    generator = Random(seed)
    words = [word for row in rows for word in text_of(row.prompt).split()]
    made = []
    for _ in range(count):
        text = " ".join(generator.choices(words, k=generator.randint(3, 20)))
        form = generator.choice(list(FORMS))
        made.append(Row(f"{form}: {text}", FORMS[form](text), "copying"))
    return made
