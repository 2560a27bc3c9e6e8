"""Running text as prompts and completions: the first words of a text, and those that follow.

SPRINTER is trained on such text (Wikipedia summaries, LM1B). It is streamed from the hub, so a few
thousand texts of a large set do not cost its download. This file knows nothing of tokens.
"""

from dataclasses import dataclass
from itertools import islice

from slipstream.core.errors import InputError
from slipstream.data.rows import Row, loading


@dataclass(frozen=True)
class TextSource:
    """Texts of a data set on the hub.

    text: the column; prompt_words, completion_words: how many words of a text become its prompt and
    at most its completion (texts without a completion are passed over); texts: for each split of
    ours, the first text and how many, of the set's own split `split`; data_files, revision: as in
    `datasets.load_dataset`.
    """

    name: str
    text: str
    source: str
    prompt_words: int
    completion_words: int
    texts: dict[str, list[int]]
    split: str = "train"
    data_files: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.prompt_words < 1 or self.completion_words < 1:
            raise InputError("data.hub: prompt_words and completion_words must be at least 1")

    def rows(self, split: str) -> list[Row]:
        """Stream `split` and divide its texts. Raises `InputError` as `loading` does, and where no
        text is long enough."""
        import datasets

        if split not in self.texts:
            raise InputError(f"data.hub: {self.source} has no {split} split; add it to texts")
        first, count = self.texts[split]
        with loading(self.name):
            table = datasets.load_dataset(
                self.name,
                split=self.split,
                data_files=self.data_files,
                revision=self.revision,
                streaming=True,
            )
            chosen = islice(table, first, first + count)
            texts = [(columns[self.text] or "").split() for columns in chosen]
        end = self.prompt_words + self.completion_words
        rows = [
            Row(
                " ".join(words[: self.prompt_words]),
                " " + " ".join(words[self.prompt_words : end]),
                self.source,
            )
            for words in texts
            if len(words) > self.prompt_words
        ]
        if not rows:
            raise InputError(
                f"data.hub: no text of {self.source} has more than {self.prompt_words} words; set "
                "a smaller prompt_words"
            )
        return rows
