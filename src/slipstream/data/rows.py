"""Prompt/completion rows, and local JSON Lines files of them.

A row is one example: a prompt, and the completion that answers it. Local files are `.jsonl` or
`.jsonl.gz`, one JSON object a line with the strings `prompt` and `completion`, and possibly
`system`; or with a list `messages` of `role` and `content`, whose last one, if it is the
assistant's, is the completion. Question files of MT-Bench and Spec-Bench, with a list `turns`, are
read as prompts, too: the first turn of each. This file knows nothing of tokens.
"""

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from slipstream.core.errors import InputError, naming

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


def read_rows(path: str | Path, split: str, completion_required: bool = True) -> list[Row]:
    """Read the rows of one file, or of the file named `split` in a folder.

    `path` is a `.jsonl` or `.jsonl.gz` file, or a folder that holds `<split>.jsonl[.gz]`.
    Raises `InputError` for a missing, empty, truncated, non-UTF-8 or malformed file.
    """
    path = Path(path)
    source = path.name.split(".")[0]
    if path.is_dir():
        source, found = path.name, [path / (split + suffix) for suffix in SUFFIXES]
        path = next((file for file in found if file.exists()), path)
        if path.is_dir():
            raise InputError(
                f"data.path: folder {path} holds no {split}.jsonl or {split}.jsonl.gz; "
                "name a file, or a folder with that split"
            )
    elif source in ("train", "validation", "test", "questions"):
        source = path.resolve().parent.name
    if not path.exists():
        raise InputError(f"data.path: {path} does not exist; give a .jsonl or .jsonl.gz file")
    rows = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            where = f"data.path: {path} line {number}"
            rows.append(_parse_line(where, line, source, completion_required))
    if not rows:
        raise InputError(
            f"data.path: {path} holds no rows; give a file with one JSON object a line"
        )
    return rows


def by_prompt(rows: list[Row]) -> list[list[Row]]:
    """The rows of each prompt, in the order in which prompts first come."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(json.dumps(row.prompt), []).append(row)
    return list(found.values())


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


def _parse_line(where: str, line: str, source: str, completion_required: bool) -> Row:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where} is not valid JSON ({error.msg}); the file may be truncated: mend or remove "
            "that line"
        ) from error
    record = record if isinstance(record, dict) else {}
    system, turns = record.get("system"), record.get("turns")
    before = [] if system is None else [{"role": "system", "content": system}]
    if "messages" in record and record.get("prompt") is None:
        messages = record["messages"]
        messages = [*before, *messages] if isinstance(messages, list) else messages
        with naming(where):
            return _of_messages(messages, source, completion_required)
    if isinstance(turns, list) and turns and "prompt" not in record:
        record["prompt"] = turns[0]
    needed = ["prompt", "completion"] if completion_required else ["prompt"]
    for name in needed + ["system"] * len(before):
        if not isinstance(record.get(name), str):
            every = " and ".join(map(repr, needed))
            raise InputError(
                f"{where} has no text field {name!r}; every row needs {every}, or 'messages'"
            )
    prompt = [*before, *messages_of(record["prompt"])] if before else record["prompt"]
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
