"""The prompts a run decodes: rows of test files, or generated ones, with their references."""

from dataclasses import dataclass
from pathlib import Path

from slipstream.core.errors import InputError
from slipstream.data.rows import read_rows, spread
from slipstream.data.synthetic import SyntheticPrompts


@dataclass(frozen=True)
class Prompt:
    """One prompt. source: its prompt set; references: known good answers, possibly none."""

    text: str
    source: str
    references: tuple[str, ...] = ()


class PromptSets:
    """Prompts of one or several sets.

    path: test file, folder with a test split, or a list of them; without one, prompts of
    `synthetic_kinds` are generated from `seed` (held out from those used in training).
    """

    def __init__(self, path: str | list[str] | None, synthetic_kinds: list[str] | None, seed: int):
        self.paths = [path] if isinstance(path, str | Path) else list(path or [])
        self.synthetic_kinds, self.seed = list(synthetic_kinds or []), seed
        if not (self.paths or self.synthetic_kinds):
            raise InputError("data.path: no prompts given; name a JSONL file or folder")

    def take(self, count: int) -> list[Prompt]:
        """`count` distinct prompts, in equal parts from every set, spread evenly over each."""
        if count < 1:
            raise InputError("num_prompts: must be at least 1")
        if not self.paths:
            rows = SyntheticPrompts(self.synthetic_kinds, count, self.seed, "test").rows()
            return [Prompt(row.prompt, row.source) for row in rows]
        sets = []
        for number, path in enumerate(self.paths):
            share = (count - number - 1) // len(self.paths) + 1
            sets.append(spread(_distinct(path), share))
        return [
            prompts[place]
            for place in range(max(map(len, sets)))
            for prompts in sets
            if place < len(prompts)
        ]


def _distinct(path: str) -> list[Prompt]:
    """The prompts of a file, each once, with all its references."""
    references: dict[str, list[str]] = {}
    rows = read_rows(path, "test", completion_required=False)
    for row in rows:
        references.setdefault(row.prompt, []).append(row.completion)
    source = rows[0].source
    return [
        Prompt(text, source, tuple(answer for answer in answers if answer))
        for text, answers in references.items()
    ]
