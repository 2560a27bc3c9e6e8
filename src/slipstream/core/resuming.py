"""What lets a command that was ended go on where it was: how it ends, what it is a run of, and what
it has found so far."""

import errno
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import TypeVar

from slipstream.core.errors import InputError
from slipstream.core.files import appended, check_writable, key_of, line_of, lines_of, locked, tidy
from slipstream.core.settings import set_to

T = TypeVar("T")
# Exit codes, as shells have them: 128 and the signal's number.
TERMINATED, BY_CTRL_C = 143, 130
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
"""Error numbers for a full disk, an exhausted quota and a file that would be too large."""


def how_to_go_on(output: Path) -> str:
    return f"go on with the same command, output_dir={output} and resume=auto"


@contextmanager
def stoppable(output: Path) -> Iterator[None]:
    """Within, SIGTERM and Ctrl-C end the process with 143 and 130, and a full disk is an
    `InputError`; each says how to go on in `output`."""

    def stop(*_) -> None:
        # While Lightning trains it has a handler of its own, which calls this one, too.
        if signal.getsignal(signal.SIGTERM) is stop:
            sys.exit(TERMINATED)

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if in_main else None
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as ended:
        code = getattr(ended, "code", BY_CTRL_C)
        if code in (TERMINATED, BY_CTRL_C):
            print(f"interrupted; {how_to_go_on(output)}", flush=True)
        sys.exit(code)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise InputError(
            f"output_dir: a file cannot be written ({error.strerror}); make room and "
            f"{how_to_go_on(output)}"
        ) from error
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def owned(
    folder: Path, files: tuple[str, ...] = (), folders: tuple[str, ...] = ()
) -> Iterator[None]:
    """Within, files can be written to `folder` and no other process does so (`InputError`
    otherwise); what killed ones left unfinished there is gone. files, folders: what will be
    written there, each of which is refused where the other one has its name."""
    check_writable(folder, "output_dir")
    wrong = [name for name in (".lock", *files) if (folder / name).is_dir()]
    wrong += [name for name in folders if (folder / name).is_file()]
    if wrong:
        kind = "folder" if wrong[0] in folders else "file"
        raise InputError(
            f"output_dir: {folder / wrong[0]} stands where a {kind} is to be written; choose "
            "another folder"
        )
    with locked(folder / ".lock", "output_dir", wait=False) as own:
        if not own:
            raise InputError(
                f"output_dir: another process is writing to {folder}; wait until it has ended, or "
                "choose another folder"
            )
        tidy(folder)
        yield


def flattened(content: object, name: str = "") -> dict[str, object]:
    """The values of a config, by their dotted names.

    >>> flattened({"a": {"b": 1, "c": [2]}, "d": None})
    {'a.b': 1, 'a.c': [2], 'd': None}
    """
    if not isinstance(content, dict):
        return {name: content}
    found: dict[str, object] = {}
    for key, value in content.items():
        found |= flattened(value, f"{name}.{key}" if name else str(key))
    return found


def check_same(then: dict[str, object], now: dict[str, object]) -> None:
    """`InputError` that names the first thing in which a run differs from the one it goes on."""
    for name in now | then:
        if then.get(name) != now.get(name):
            said = f"had {name}={then.get(name)}, and this one has {now.get(name)}"
            if name not in then:
                said = f"says nothing of {name}, as with other settings or of another version"
            raise InputError(
                f"resume: that run {said}; go on with the same, or give another output_dir"
            )


class Part:
    """Findings of one of the calls that a command makes, told from others by its number. Where no
    journal is open it keeps nothing. of: what it is about, as JSON."""

    def __init__(self, of: object):
        found, self._add, numbers = _journal.get()
        self._found, self._number = found, f"{next(numbers)} {key_of(of)}"

    def has(self, *place: object) -> bool:
        return json.dumps([self._number, *place]) in self._found

    def kept(self, place: tuple, find: Callable[[], T], anew: bool = False) -> T:
        """What was found at this place, or, if nothing was or it is to be found anew, what `find`
        finds now."""
        if self.has(*place) and not anew:
            return self._found[json.dumps([self._number, *place])]
        found = find()
        self._add({"place": (self._number, *place), "found": found})
        return found


_journal: ContextVar[tuple] = ContextVar("journal", default=({}, lambda finding: None, count()))
"""What is known, by place; what keeps a finding; and the numbers of parts."""


@contextmanager
def journal(path: Path, run: dict[str, object], resume: bool) -> Iterator[None]:
    """Within, what every `Part` finds is kept at `path`, each finding a line under the place it
    belongs to.

    run: what identifies the run, also in the file's first line; with `resume`, what is there is
    known, and `InputError` names the first difference from it. Without `resume` the first finding
    replaces an existing file.
    """
    run, lines = json.loads(json.dumps(run)), lines_of(path)
    if lines and not isinstance(lines[0].get("run"), dict):
        raise InputError(
            f"output_dir: {path} does not say what it is a run of; remove it, or give another "
            "folder"
        )
    lines = lines if resume else []
    if lines:
        check_same(lines[0]["run"], run)
        print(f"resume: {len(lines) - 1} findings of {path} are taken over")
    known = [each for each in lines[1:] if {"place", "found"} <= each.keys()]
    write: Callable[[str], None] | None = None

    def add(finding: dict[str, object]) -> None:
        nonlocal write
        if write is None:
            if not lines:
                path.unlink(missing_ok=True)
            write = opened.enter_context(appended(path))
            if not lines:
                write(line_of({"run": run}))
        write(line_of(finding))

    found = {json.dumps(each["place"]): each["found"] for each in known}
    with ExitStack() as opened, set_to(_journal, (found, add, count())):
        yield
