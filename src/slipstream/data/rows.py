"""Prompt/completion rows from local JSON Lines files or from the Hugging Face hub.

A row is one example: a prompt, and the completion that answers it. Local files are `.jsonl` or
`.jsonl.gz`, one JSON object a line with the strings `prompt` and `completion`, and possibly
`system`; or with a list `messages` of `role` and `content`, whose last one, if it is the
assistant's, is the completion. Question files of MT-Bench and Spec-Bench, with a list `turns`, are
read as prompts, too: the first turn of each. This file knows nothing of tokens.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from slipstream.core.errors import InputError

Item = TypeVar("Item")
SUFFIXES = (".jsonl", ".jsonl.gz")
Messages = list[dict[str, str]]
"""A conversation: the role ('system', 'user', 'assistant') and the content of each message."""


@dataclass(frozen=True)
class Row:
    """One example. prompt: a text, or the messages of a conversation up to what is answered;
    source: name of the data set it came from (the folder or file name)."""

    prompt: str | Messages
    completion: str
    source: str

    @property
    def prompt_text(self) -> str:
        """The text of the prompt; of a conversation that of its messages, one after the other."""
        return "\n".join(message["content"] for message in messages_of(self.prompt))


def messages_of(prompt: str | Messages) -> Messages:
    """A prompt as the messages of a conversation: a text is one of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Within, a data set is loaded; `InputError` where the hub cannot be reached, or the set has no
    such split or columns."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"data.hub: {name!r} could not be loaded ({type(error).__name__}); check the network "
            "and its column names, or give local JSONL files with data.path=FILE"
        ) from error


@dataclass(frozen=True)
class HubSource:
    """A data set on the hub, with templates that turn its columns into prompt and completion.

    splits: what the hub calls a split where that differs, slices included ("train[:90%]");
    revision: branch or commit, e.g. the hub's own conversion to Parquet of a scripted data set.
    """

    name: str
    prompt: str
    completion: str
    source: str
    splits: dict[str, str] = field(default_factory=dict)
    revision: str | None = None

    def rows(self, split: str) -> list[Row]:
        """Download `split` and render it; raises as `loading` does."""
        import datasets

        with loading(self.name):
            table = datasets.load_dataset(
                self.name, split=self.splits.get(split, split), revision=self.revision
            )
            return [
                Row(self.prompt.format(**columns), self.completion.format(**columns), self.source)
                for columns in table
            ]


def read_rows(path: str | Path, split: str, completion_required: bool = True) -> list[Row]:
    """Read the rows of one file, or of the file named `split` in a folder.

    `path` is a `.jsonl` or `.jsonl.gz` file, or a folder that holds `<split>.jsonl[.gz]`.
    Raises `InputError` for a missing, empty, truncated, non-UTF-8 or malformed file.
    """
    path = Path(path)
    if path.is_dir():
        found = [
            path / (split + suffix) for suffix in SUFFIXES if (path / (split + suffix)).exists()
        ]
        if not found:
            raise InputError(
                f"data.path: folder {path} holds no {split}.jsonl or {split}.jsonl.gz; "
                "name a file, or a folder with that split"
            )
        path, source = found[0], path.name
    else:
        source = path.name.split(".")[0]
        if source in ("train", "validation", "test", "questions"):
            source = path.resolve().parent.name
    if not path.exists():
        raise InputError(f"data.path: {path} does not exist; give a .jsonl or .jsonl.gz file")
    rows = [
        _parse_line(path, number, line, source, completion_required)
        for number, line in enumerate(_read_text(path).split("\n"), start=1)
        if line.strip()
    ]
    if not rows:
        raise InputError(
            f"data.path: {path} holds no rows; give a file with one JSON object a line"
        )
    return rows


def distinct(rows: list[Row]) -> list[Row]:
    """The rows of different prompts: of each prompt the last one, in the place of the first."""
    return list({json.dumps(row.prompt): row for row in rows}.values())


def spread(items: list[Item], count: int | None) -> list[Item]:
    """`count` of the items, evenly over the list; all of them if there are no more, or for None.

    >>> spread([0, 1, 2, 3, 4, 5], 3)
    [0, 2, 4]
    """
    if count is None or count >= len(items):
        return items
    return [items[place * len(items) // count] for place in range(count)]


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")  # with or without a byte order mark
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"data.path: {path} is truncated or not gzip ({error}); fetch the file again"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"data.path: {path} is not UTF-8 at byte {error.start}; convert it to UTF-8"
        ) from error
    except OSError as error:
        raise InputError(f"data.path: {path} cannot be read ({error.strerror})") from error


def _parse_line(path: Path, number: int, line: str, source: str, completion_required: bool) -> Row:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"data.path: {path} line {number} is not valid JSON ({error.msg}); "
            "the file may be truncated: mend or remove that line"
        ) from error
    record = record if isinstance(record, dict) else {}
    system = record.get("system")
    if "messages" in record and record.get("prompt") is None:
        messages = record["messages"]
        if system is not None and isinstance(messages, list):
            messages = [{"role": "system", "content": system}, *messages]
        try:
            return _of_messages(messages, source, completion_required)
        except InputError as error:
            raise InputError(f"data.path: {path} line {number}: {error}") from error
    turns = record.get("turns")
    if isinstance(turns, list) and turns and "prompt" not in record:
        record["prompt"] = turns[0]
    needed = ["prompt", "completion"] if completion_required else ["prompt"]
    for name in needed + ["system"] * (system is not None):
        if not isinstance(record.get(name), str):
            raise InputError(
                f"data.path: {path} line {number} has no text field {name!r}; every row needs "
                + " and ".join(map(repr, needed))
                + ", or 'messages'"
            )
    prompt = record["prompt"]
    if system is not None:
        prompt = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
    return Row(prompt, record.get("completion") or "", source)


def _of_messages(messages: object, source: str, completion_required: bool) -> Row:
    check_messages(messages)
    if messages[-1]["role"] != "assistant":
        if completion_required:
            raise InputError(
                "messages: the last one is not of the assistant, so there is nothing to learn; "
                "leave it out, or let the target answer with data.regenerate=true"
            )
        return Row(messages, "", source)
    if len(messages) == 1:
        raise InputError("messages: the only one is an answer to nothing; leave the row out")
    return Row(messages[:-1], messages[-1]["content"], source)


def check_messages(messages: object) -> None:
    """`InputError` unless these are one or more messages with the texts `role` and `content`."""
    if not isinstance(messages, list) or not messages:
        raise InputError("messages: give a list of at least one message with role and content")
    for place, message in enumerate(messages):
        for name in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(name), str):
                raise InputError(
                    f"messages[{place}]: it has no text {name!r}; every message needs 'role' and "
                    "'content'"
                )
