"""Writing files so that a reader finds the old content or the new one, and never half of it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: str | Path, write: Callable[[BinaryIO], None]) -> None:
    """Replace the file at `path` by what `write` writes into the file it is given.

    That file lies in the same folder, which is made if missing, and takes the place of the old one
    when its content is on the disk. Where `write` or the disk fails (OSError) the old file stays as
    it was, and nothing else is left behind.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
