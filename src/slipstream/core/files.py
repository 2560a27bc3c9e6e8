"""Every file the project writes is written here: a reader finds the old content or the new one,
and never half of it. It does not know what the files hold.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace the file at `path` by what `write` writes into the file it is given.

    That file lies in the same folder, which is made if missing, and takes the place of the old one
    when its content is on the disk. Where `write` or the disk fails (OSError) the old file stays as
    it was, and nothing else is left behind.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _unfinished(path)
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Replace the file at `path` by `text`, in UTF-8."""
    write_atomically(path, lambda file: file.write(text.encode()))


def write_json(path: str | Path, content: object) -> None:
    """Replace the file at `path` by `content` as indented JSON, with a line break at its end."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def key_of(*content: object) -> str:
    """24 letters and digits, the same for the same content (anything that JSON has): the name of a
    file that keeps what was made from it."""
    return hashlib.sha256(json.dumps(list(content)).encode()).hexdigest()[:24]


@contextmanager
def replaced_folder(path: str | Path) -> Iterator[Path]:
    """Within, an empty folder to fill; after, it stands at `path`, its files on the disk.

    A folder that stands there stays until the new one is complete; after an error (OSError, or one
    raised within) it is there as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _unfinished(path)
    shutil.rmtree(unfinished, ignore_errors=True)
    made, old = unfinished / "new", unfinished / "old"
    made.mkdir(parents=True)
    try:
        yield made
        for each in [*made.rglob("*"), made]:
            _sync(each)
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(made, path)
        except OSError:
            if old.exists():
                os.replace(old, path)
            raise
        _sync(path.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def appended(path: str | Path) -> Iterator[Callable[[str], None]]:
    """Within, a function that adds lines to the file at `path`, which is made if missing.

    The tail of a line that an interruption cut off is removed first, with a sentence. Each line is
    on the disk when the function returns.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _cut_torn_tail(path, file)

        def add(line: str) -> None:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

        yield add


def _cut_torn_tail(path: Path, file: BinaryIO) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        file.truncate(whole)
        print(f"note: {path} ended in the middle of a line; its last {len(content) - whole} bytes "
              "were cut off")  # fmt: skip


def _unfinished(path: Path) -> Path:
    """Where the content of `path` lies until it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}.unfinished")


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk; some systems cannot do so for folders."""
    with suppress(PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
