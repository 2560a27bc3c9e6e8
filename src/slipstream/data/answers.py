"""Answers to many prompts, kept on disk: shared out over processes, gone on with, always one file.

Each process answers its share and adds what is done to a part of its own, an append-only file whose
lines are keyed by prompt. When all prompts have answers the first process writes them, in order,
into the one file that every process reads, and the parts go.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from slipstream.core.files import appended, line_of, lines_of, locked, write_text
from slipstream.core.processes import launched

log = logging.getLogger(__name__)
WAIT_SECONDS = 0.5
"""Between two looks at whether the other processes are done."""


@dataclass(frozen=True)
class Question:
    """What is to be answered: the tokens `ids`; temperature, seed: how this answer is drawn."""

    ids: list[int]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answered:
    """ids: tokens of the answer, its end token included; ended: False where the limit cut it off,
    so that nothing says how it ends."""

    ids: list[int]
    ended: bool


NOTHING = Answered([], ended=False)
"""Of a prompt that could not be answered; such are not kept beyond a run."""


class Answerer(ABC):
    """Who answers, in tokens below `vocab_size`. shared: whether processes may answer different
    prompts; refusal: why some prompts got no answer."""

    shared = True
    refusal: Exception | None = None
    vocab_size: int

    @abstractmethod
    def portions(self, questions: Sequence[Question]) -> list[list[int]]:
        """Which questions are answered together: each in one portion, the same in every run."""

    @abstractmethod
    def answer(
        self, questions: Sequence[Question], portions: list[list[int]], done: Callable[[int], None]
    ) -> Iterator[dict[int, Answered]]:
        """The answers of one portion after the other, in any order, by the number of the question;
        `done` is called as so many more are answered."""


def kept_answers(
    path: Path, questions: Sequence[Question], answerer: Answerer, field: str
) -> list[Answered]:
    """The answers to all `questions`, in order: those in the file at `path`, and its parts, and
    what `answerer` finds for the others; `InputError` where these are missing and the folder, of
    config `field`, cannot be written."""
    known = _read(path, answerer.vocab_size)
    if len(known) < len(questions) or not path.exists():
        # A run of its own that wants the same answers waits, and finds them.
        with locked(path.with_suffix(f".{launched()[0]}.lock"), field):
            known = _read(path, answerer.vocab_size)
            if len(known) < len(questions) or not path.exists():
                _fill(path, known, questions, answerer)
    return [known[number] for number in range(len(questions))]


def _fill(
    path: Path, known: dict[int, Answered], questions: Sequence[Question], answerer: Answerer
) -> None:
    """Add what is missing to `known`: the share of this process, and those of the others."""
    (rank, count), portions = launched(), answerer.portions(questions)
    portions = portions[rank::count] if answerer.shared else portions
    missing = [own for own in portions if any(number not in known for number in own)]
    if missing:
        num_own, num_missing = sum(map(len, portions)), sum(map(len, missing))
        with (
            appended(path.with_suffix(f".part-{rank}.jsonl")) as add,
            tqdm(
                total=num_own, initial=num_own - num_missing, desc="answering", unit="prompt",
                disable=rank > 0,
            ) as bar,
        ):  # fmt: skip
            for found in answerer.answer(questions, missing, bar.update):
                known |= found
                add(_lines(found))
    if len(known) < len(questions):
        log.warning("waiting for what other processes answer into %s", path.parent)
    while len(known) < len(questions):
        time.sleep(WAIT_SECONDS)
        known.update(_read(path, answerer.vocab_size))
    if rank == 0:
        write_text(path, _lines({n: own for n, own in known.items() if own != NOTHING}) + "\n")
        for part in _parts(path):
            part.unlink()


def _parts(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.stem}.part-*.jsonl"))


def _lines(answers: dict[int, Answered]) -> str:
    """The lines of a file with these answers, in the order of the prompts."""
    kept = [{"prompt": number} | vars(answers[number]) for number in sorted(answers)]
    return "\n".join(map(line_of, kept))


def _read(path: Path, vocab_size: int) -> dict[int, Answered]:
    """The answers of a file and its parts; lines that an interruption cut off are passed over, and
    those that hold something else."""
    found: dict[int, Answered] = {}
    for each in (path, *_parts(path)):
        for kept in lines_of(each):  # none of a part that has gone into the whole since
            number, ids, ended = (kept.get(name) for name in ("prompt", "ids", "ended"))
            if type(number) is not int or type(ids) is not list or type(ended) is not bool:
                continue
            if all(type(token) is int and 0 <= token < vocab_size for token in ids):
                found[number] = Answered(ids, ended)
    return found
