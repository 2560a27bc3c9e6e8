"""Prompt/completion rows, and local JSON Lines files of them.

Files have one JSON object a line with the strings `prompt` and `completion`, and possibly `system`;
or with a list `messages` of `role` and `content`, whose last one, if it is the assistant's, is the
completion (or such lists as `prompt` and `completion`, as TRL has them). Files of benchmarks are
read as they are. Nothing is known of tokens here.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from slipstream.core.errors import InputError, naming

Item = TypeVar("Item")
SUFFIXES = (".jsonl", ".jsonl.gz")
UNPACKED, RATIO = 2**24, 50
"""A compressed file may unpack to so many bytes, or to so many times its own: texts do to some ten
times, zip bombs to a thousand."""
MOST_WRONG = 1000
"""After so many wrong rows no more are read."""
LONGEST_LINE = 2**26
"""Bytes of a line; no context of any model is as long."""
Messages = list[dict[str, str]]
"""A conversation: the role ('system', 'user', 'assistant') and the content of each message."""
UNLEARNED = "tool_calls", "reasoning_content"
"""What an answer may have beside its content, and a template writes in a way of its own."""
MBPP = (
    "You are an expert Python programmer, and here is your task: {text} Your code should pass "
    "these tests:\n\n{tests}\n"
)
CLASS_EVAL = "Please complete the class {class_name} in the following code.\n{skeleton}"
"""What stands around a task of MBPP and of ClassEval: the wording of their papers."""
SPEAKERS = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")
"""The roles of those whom ShareGPT names."""


@dataclass(frozen=True)
class Row:
    """One example. prompt: a text, or the messages of a conversation up to what is answered;
    source: name of the data set it came from (the folder or file name); category: within it, ""
    where there are none; later: questions that are asked after the answer."""

    prompt: str | Messages
    completion: str
    source: str
    category: str = ""
    later: tuple[str, ...] = ()


def text_of(prompt: str | Messages) -> str:
    """The text of a prompt; of a conversation that of its messages, one after the other."""
    return "\n".join(message["content"] for message in messages_of(prompt))


def named(prompt: str | Messages) -> str:
    """What errors call a prompt: its first words, by which it is found."""
    return f"data: the row that begins {' '.join(text_of(prompt).split())[:60]!r}"


def messages_of(prompt: str | Messages) -> Messages:
    """A prompt as the messages of a conversation: a text is one of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def check_there(path: str | Path) -> None:
    """`InputError` unless there is something at this path."""
    if not Path(path).exists():
        raise InputError(f"data.path: {path} does not exist; give a folder or a .jsonl file")


def read_rows(path: str | Path, split: str, completion_required: bool = True) -> list[Row]:
    """Read the rows of one `.jsonl` or `.jsonl.gz` file, or of the file named `split` in a folder;
    `InputError` for a missing, empty, truncated, non-UTF-8 or malformed file, which names the
    first rows that something is wrong in, and counts them."""
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
    check_there(path)
    rows, wrong = [], {}
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            where = f"data.path: {path} line {number}"
            try:
                rows.append(_parse_line(where, line, source, completion_required))
            except InputError as error:
                wrong[number] = str(error)
        if len(wrong) > MOST_WRONG:
            break
    if wrong:
        first, *others = wrong
        named = ", ".join(map(str, others[:10])) + (", ..." if others[10:] else "")
        so = f"; there is something wrong in {len(others)} more, lines {named}" if others else ""
        raise InputError(wrong[first] + so)
    if not rows:
        raise InputError(
            f"data.path: {path} holds no rows; give a file with one JSON object a line"
        )
    return rows


def by_prompt(rows: list[Row]) -> list[list[Row]]:
    """The rows of each prompt, in the order in which prompts first come."""
    return list(grouped(rows, lambda row: json.dumps(row.prompt)).values())


def grouped(items: Iterable[Item], key: Callable[[Item], str]) -> dict[str, list[Item]]:
    """The items of each key, in the order in which keys first come."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def spread(items: list[Item], count: int | None) -> list[Item]:
    """`count` of the items, evenly over the list; all of them if there are no more, or for None.

    >>> spread([0, 1, 2, 3, 4, 5], 3)
    [0, 2, 4]
    """
    if count is None or count >= len(items):
        return items
    return [items[place * len(items) // count] for place in range(count)]


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, which line feeds alone end; never more of it than a line at a time."""
    packed = path.suffix == ".gz"
    try:
        left = max(UNPACKED, RATIO * path.stat().st_size)
        with gzip.open(path) if packed else path.open("rb") as file:
            for line in iter(partial(file.readline, LONGEST_LINE + 1), b""):
                left -= len(line)
                if len(line) > LONGEST_LINE:
                    raise InputError(
                        f"data.path: {path} has a line of more than {LONGEST_LINE} bytes; split it"
                    )
                if packed and left < 0:
                    raise InputError(
                        f"data.path: {path} unpacks to more than {RATIO} times its size; give it "
                        "unpacked if that is meant"
                    )
                yield line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark is no text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"data.path: {path} is truncated or not gzip ({error}); fetch the file again"
        ) from error
    except OSError as error:
        raise InputError(f"data.path: {path} cannot be read ({error.strerror})") from error


def _parse_line(where: str, line: bytes, source: str, completion_required: bool) -> Row:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8 at its byte {error.start}; convert the file to UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, too
        reason = getattr(error, "msg", "nested too deeply, or a number is too long")
        raise InputError(
            f"{where} is not valid JSON ({reason}); the file may be truncated, or a list over "
            "several lines: every line needs one whole object"
        ) from error
    if not isinstance(record, dict):
        raise InputError(f"{where} is no JSON object; every line needs one, and a file no list")
    # null is what tables of several forms have for the fields of the others
    record, later = _as_row({name: each for name, each in record.items() if each is not None})
    if record.get("tools"):
        raise InputError(f"{where} has 'tools', which nothing here tells a model; leave them out")
    if record.get("messages") and not isinstance(record.get("completion"), str):
        record = record | {"prompt": None}  # of the conversation its first words, in some sets
    if isinstance(record.get("prompt"), list):  # a conversation, as TRL has it
        answer = record.get("completion") or []
        if not isinstance(answer, list):
            answer = [{"role": "assistant", "content": answer}]
        record = record | {"messages": [*record["prompt"], *answer], "prompt": None}
    system, category = record.get("system"), record.get("category")
    before = [] if system is None else [{"role": "system", "content": system}]
    if "messages" in record and record.get("prompt") is None:
        messages = record["messages"]
        messages = [*before, *messages] if isinstance(messages, list) else messages
        with naming(where):
            return _of_messages(messages, source, completion_required)
    needed = ["prompt", "completion"] if completion_required else ["prompt"]
    given = [name for name in ("system", "completion") if record.get(name) is not None]
    for name in dict.fromkeys(needed + given):
        if not isinstance(record.get(name), str):
            every = " and ".join(map(repr, needed))
            raise InputError(
                f"{where} has no text field {name!r}; every row needs {every}, or 'messages'"
            )
        check_text(record[name], f"{where} {name!r}")
    prompt = [*before, *messages_of(record["prompt"])] if before else record["prompt"]
    category = category if isinstance(category, str) else ""
    for question in later:
        if not isinstance(question, str):
            raise InputError(f"{where} 'turns': every turn must be a text")
        check_text(question, f"{where} 'turns'")
    return Row(prompt, record.get("completion") or "", source, category, tuple(later))


def _as_row(record: dict) -> tuple[dict, list]:
    """A row of a benchmark, told by its fields (`turns` of MT-Bench and Spec-Bench; programs of
    MBPP, HumanEval and ClassEval), with the field `prompt`, and `completion` where one is known,
    and the questions that are asked after the answer; so one of Alpaca's form, and ShareGPT's
    `conversations` as `messages`; another `record` as it is, and none.

    >>> _as_row({"turns": ["One?", "Two?"]})
    ({'turns': ['One?', 'Two?'], 'prompt': 'One?'}, ['Two?'])
    """
    turns, tests, spoken = map(record.get, ("turns", "test_list", "conversations"))
    if isinstance(spoken, list) and not {"messages", "prompt"} & record.keys():
        messages = [_as_message(each) if isinstance(each, dict) else each for each in spoken]
        return record | {"messages": messages}, []
    if isinstance(turns, list) and turns and "prompt" not in record:
        return record | {"prompt": turns[0]}, turns[1:]
    if {"text", "code"} <= record.keys() and isinstance(tests, list):
        prompt = MBPP.format(text=record["text"], tests="\n".join(map(str, tests)))
        record = record | {"prompt": prompt, "completion": record["code"]}
    elif {"skeleton", "class_name", "solution_code"} <= record.keys():
        prompt = CLASS_EVAL.format_map(record)
        record = record | {"prompt": prompt, "completion": record["solution_code"]}
    elif {"instruction", "output"} <= record.keys() and "prompt" not in record:
        asked = [record["instruction"], record.get("input")]
        prompt = "\n\n".join(str(each) for each in asked if each)
        record = record | {"prompt": prompt, "completion": record["output"]}
    elif {"prompt", "canonical_solution"} <= record.keys():
        record = {"completion": record["canonical_solution"]} | record
    return record, []


def _as_message(said: dict) -> dict:
    """A message of a conversation as ShareGPT has it; one that has a role already as it is."""
    if "role" in said:
        return said
    speaker = str(said.get("from"))
    return {"role": SPEAKERS.get(speaker, speaker), "content": said.get("value")}


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
    for name in UNLEARNED:
        if completion_required and messages[-1].get(name):
            raise InputError(
                f"messages: the answer has {name!r}, which would not be learned; write it into "
                "the content as the model would, or leave the row out"
            )
    return Row(messages[:-1], messages[-1]["content"], source)


def check_text(text: str, field: str) -> None:
    """`InputError` for a text with halves of a surrogate pair, which no encoding has: JSON may
    spell them as \\ud800, and what is no UTF-8 on a command line becomes such."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{field}: it has half of a surrogate pair, which is no text, at character "
            f"{error.start}; mend it or leave it out"
        ) from error


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
            check_text(message[name], f"messages[{place}]")
