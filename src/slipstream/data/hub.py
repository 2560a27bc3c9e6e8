"""Rows of data sets of the Hugging Face hub: tables of prompts and completions, or running text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Literal

from slipstream.core.errors import InputError
from slipstream.core.settings import Amount, Count, Len, Settings, Text
from slipstream.data.rows import Row


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Within, a data set is loaded; `InputError` where the hub cannot be reached, or the set has no
    such split or column."""
    try:
        yield
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise InputError(
            f"data.hub: {name!r} could not be loaded ({type(error).__name__}); check the network "
            "and its column names, or give local JSONL files with data.path=FILE"
        ) from error


SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class HubSource(Settings):
    """A data set with templates that turn its columns into prompt and completion.

    splits: what the hub calls a split where that differs, slices included ("train[:90%]");
    revision: branch or commit, e.g. the hub's own conversion to Parquet of a scripted data set.
    """

    section = "data.hub"
    name: Text
    prompt: str
    completion: str
    source: Text
    splits: dict[Literal[SPLITS], Text] = field(default_factory=dict)
    revision: Text | None = None

    def rows(self, split: str, completion_required: bool = True) -> list[Row]:
        """Download `split` and render it; raises as `loading` does, and where completions are
        required and it has none."""
        from datasets import load_dataset

        if completion_required and not self.completion:
            raise InputError(
                f"data.hub: {self.source} is taken without completions; let the target answer with "
                "data.regenerate=true"
            )
        with loading(self.name):
            given = self.splits.get(split, split)
            rows = [
                Row(self.prompt.format(**columns), self.completion.format(**columns), self.source)
                for columns in load_dataset(self.name, split=given, revision=self.revision)
            ]
        if not rows:
            raise InputError(
                f"data.hub: {self.source} has no rows in its {given} split; name another in splits"
            )
        return rows


@dataclass(frozen=True)
class TextSource(Settings):
    """Texts, whose first words are prompts, and those that follow completions. SPRINTER is trained
    on such (Wikipedia summaries, LM1B). They are streamed, so a few thousand texts of a large set
    do not cost its download.

    text: the column; prompt_words, completion_words: how many words of a text become its prompt and
    at most its completion (texts without a completion are passed over); texts: for each split of
    ours, the first text and how many, of the set's own split `split`; data_files, revision: as in
    `datasets.load_dataset`.
    """

    section = "data.hub"
    name: Text
    text: Text
    source: Text
    prompt_words: Count
    completion_words: Count
    texts: dict[Literal[SPLITS], Annotated[Sequence[Amount], Len(2, 2)]]
    split: Text = "train"
    data_files: Text | None = None
    revision: Text | None = None

    def rows(self, split: str, completion_required: bool = True) -> list[Row]:
        """Stream `split` and divide its texts. Raises `InputError` as `loading` does, and where no
        text is long enough."""
        from datasets import load_dataset

        if split not in self.texts:
            raise InputError(f"data.hub: {self.source} has no {split} split; add it to texts")
        first, count = self.texts[split]
        options = dict(data_files=self.data_files, revision=self.revision, streaming=True)
        with loading(self.name):
            table = load_dataset(self.name, split=self.split, **options)
            chosen = islice(table, first, first + count)
            texts = [(columns[self.text] or "").split() for columns in chosen]
        parts = [
            (words[: self.prompt_words], words[self.prompt_words :][: self.completion_words])
            for words in texts
        ]
        rows = [Row(" ".join(a), " " + " ".join(b), self.source) for a, b in parts if b]
        if not rows:
            raise InputError(
                f"data.hub: no text of {self.source} has more than {self.prompt_words} words; set "
                "a smaller prompt_words"
            )
        return rows
