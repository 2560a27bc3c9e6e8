"""Every file the project writes is written here: a reader finds the old content or the new one,
and never half of it; what a disk has spoiled since is noticed by a checksum."""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import torch
from filelock import FileLock, Timeout

from slipstream.core.errors import InputError, first_sentence

log = logging.getLogger(__name__)

SUMS = "SHA256SUMS"
"""The checksums of a folder's files, as `sha256sum --check` reads them."""


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


def save_tensors(path: str | Path, content: object) -> None:
    """Replace the file at `path` by tensors and what they lie in, as `torch.save` writes it: a zip
    file, which has a checksum of each of its parts."""

    def write(file: BinaryIO) -> None:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # PyTorch's words for what `file` raised
            raise (error.__context__ or error) from None

    write_atomically(path, write)


def load_tensors(path: str | Path) -> object:
    """What `save_tensors` wrote; OSError where it cannot be read or is not what was written."""
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"{damaged} has another checksum")
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of a file that is none, or no longer one, anything can be wrong
        raise OSError(f"{path} is damaged ({first_sentence(error)})") from error


def key_of(*content: object) -> str:
    """24 letters and digits, the same for the same content (anything that JSON has): the name of a
    file that keeps what was made from it."""
    return hashlib.sha256(json.dumps(list(content)).encode()).hexdigest()[:24]


@contextmanager
def replaced_folder(path: str | Path) -> Iterator[Path]:
    """Within, an empty folder to fill; after, it stands at `path`, its files and their checksums
    on the disk.

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
        files = sorted(each for each in made.rglob("*") if each.is_file())
        sums = [f"{sum_of(each)}  {each.relative_to(made).as_posix()}\n" for each in files]
        (made / SUMS).write_text("".join(sums), encoding="utf-8")
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


def sum_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_intact(path: Path) -> bool:
    """Whether a file of a folder is as it was written there; True where no checksum was kept."""
    try:
        lines = (path.parent / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return True
    kept = {name: known for known, _, name in (line.partition("  ") for line in lines)}
    return path.name not in kept or kept[path.name] == sum_of(path)


def check_intact(folder: str | Path) -> None:
    """Raise OSError for a file of a folder, if it is one, that is not as it was written there;
    cards may be edited."""
    for path in sorted(Path(folder).glob("*")):
        if path.suffix != ".md" and path.is_file() and not is_intact(path):
            raise OSError(
                f"{path.name} is not what was written: copy it again, or, if you have changed it, "
                f"remove its line from {SUMS}"
            )


def times_of(folder: str | Path) -> tuple[int, ...]:
    """Modification times of the files in a folder, in nanoseconds, by which a replaced folder is
    noticed; () where there is no folder."""
    files = sorted(Path(folder).glob("*"))
    return tuple(file.stat().st_mtime_ns for file in files if file.is_file())


def line_of(content: dict) -> str:
    """A line of JSON with a checksum, for `appended` and `write_text`."""
    text = json.dumps(content)
    return json.dumps(content | {"crc32": zlib.crc32(text.encode())})


def lines_of(path: Path) -> list[dict]:
    """What is in the lines of a file, none where there is no file; a line that was cut off or
    damaged is left out. Lines without a checksum count."""
    found = []
    try:
        lines = path.read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return found
    for line in lines:
        with suppress(ValueError, AttributeError, TypeError, RecursionError):
            content = json.loads(line)
            known = content.pop("crc32", None)
            if known in (None, zlib.crc32(json.dumps(content).encode())):
                found.append(content)
    return found


def check_writable(folder: Path, field: str) -> None:
    """Create `folder` and check that files can be written there (`InputError` otherwise)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise InputError(
            f"{field}: cannot write to {folder} ({error.strerror}); choose another folder"
        ) from error


@contextmanager
def locked(path: Path, field: str, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file at `path` within; yields True. Where another process holds it, wait, or
    with `wait=False` yield False at once. A process that is killed releases its lock. Raises
    `InputError` where the folder, of config `field`, cannot be written."""
    check_writable(path.parent, field)
    lock = FileLock(path)
    with suppress(Timeout):
        lock.acquire(blocking=False)
    if wait and not lock.is_locked:
        log.warning("waiting for another process that works in %s", path.parent)
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        if lock.is_locked:
            path.unlink(missing_ok=True)  # who waits for it notices
        lock.release()


@contextmanager
def appended(path: str | Path) -> Iterator[Callable[[str], None]]:
    """Within, a function that adds lines to the file at `path`, which is made if missing.

    The tail of a line that an interruption cut off is removed first, with a sentence. Each line is
    on the disk when the function returns.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _sync(path.parent)
        content = path.read_bytes()
        if torn := len(content) - content.rfind(b"\n") - 1:
            file.truncate(len(content) - torn)
            print(f"note: {path} ended in the middle of a line; its last {torn} bytes were cut off")

        def add(line: str) -> None:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

        yield add


def tidy(folder: Path) -> None:
    """Remove what killed processes left unfinished below `folder`, which no other process may be
    writing to; a folder that one of them had moved away, and not replaced, is put back."""
    for left in folder.rglob(".*.unfinished"):
        name, number, _ = left.name[1:].rsplit(".", 2)
        if number.isdecimal() and not _runs(int(number)):
            if (left / "old").exists() and not left.with_name(name).exists():
                os.replace(left / "old", left.with_name(name))
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def _runs(number: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return number != os.getpid()  # what has this one's number was left by an earlier process


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
