"""Where rows come from: local files, else data sets of the hub, else the prompts that ship."""

from pathlib import Path

from slipstream.core.errors import InputError
from slipstream.data.rows import HubSource, Row, read_rows
from slipstream.data.synthetic import SyntheticPrompts


class Sources:
    """path: local file or folder, or a list of them; wins over the others. hub: data sets on the
    hub, by name. synthetic_kinds: kinds of shipped prompts, used when neither is given, in an order
    that `seed` chooses. Raises `InputError` where nothing is given."""

    def __init__(
        self,
        path: str | list[str] | None,
        hub: dict[str, HubSource] | None,
        synthetic_kinds: list[str] | None,
        seed: int,
    ):
        self.paths = [path] if isinstance(path, str | Path) else list(path or [])
        self.hub = list((hub or {}).values())
        self.kinds, self.seed = list(synthetic_kinds or []), seed
        if not (self.paths or self.hub or self.kinds):
            raise InputError("data.path: no data given; name a JSONL file or folder")

    @property
    def given(self) -> bool:
        """Whether the rows are of files or data sets, not prompts that ship."""
        return bool(self.paths or self.hub)

    def tables(self, split: str, completion_required: bool = True) -> list[list[Row]]:
        """The rows of each file or data set."""
        if self.paths:
            return [read_rows(path, split, completion_required) for path in self.paths]
        return [source.rows(split) for source in self.hub]

    def synthetic(self, count: int, split: str) -> list[Row]:
        """`count` of the prompts that ship."""
        return SyntheticPrompts(self.kinds, count, self.seed, split).rows()
