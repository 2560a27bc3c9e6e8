"""Every command that writes, ended at random moments; the same command with resume=auto goes on
each time, and what it ends with is compared, bit for bit, with that of a run that nobody ended.

    python -m tests.torture --kills 60 --terms 20 --interrupts 20 --seed 0

which is `make torture`. After each end no checkpoint and no kept line may be torn or lost.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

for name, value in (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("WANDB_MODE", "disabled")):
    os.environ[name] = value
# The processes that are ended are forked from one that has imported everything.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["slipstream.app", "lightning", "tests.torture_commands"])
SIGNALS = {"kills": signal.SIGKILL, "terms": signal.SIGTERM, "interrupts": signal.SIGINT}
CODES = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}
BEGUN = "Seed set", "decoding", "calibrating"
"""What commands say when they have begun."""
LONGEST = 300.0
"""Seconds after which a run is held to hang."""


@dataclass
class Trial:
    """A command and where it works. lines: kept lines that must not be lost; steps: of the newest
    checkpoint."""

    kind: str
    world: Path
    output: Path
    lines: int = 0
    steps: int = 0

    @property
    def log(self) -> Path:
        return self.world.parent / f"{self.kind}.log"

    def start(self, *overrides: str, most_bytes: int | None = None):
        from tests.torture_commands import command

        given = self.kind, self.world, self.output, self.log, overrides, most_bytes
        self.log.write_bytes(b"")  # of the run before, if this one ends before it opens its own
        process = PROCESSES.Process(target=command, args=given)
        process.start()
        return process

    def run(self, *overrides: str, most_bytes: int | None = None) -> int:
        process = self.start(*overrides, most_bytes=most_bytes)
        process.join(LONGEST)
        assert process.exitcode is not None, f"{self.kind}: it hangs\n{self.said()}"
        return process.exitcode

    def end(self, number: signal.Signals, after: float) -> str:
        """Go on, and send the signal so many seconds later; says when it came."""
        process = self.start("resume=auto")
        process.join(after)
        if process.exitcode is None:
            os.kill(process.pid, number)
        process.join(LONGEST)
        code, said = process.exitcode, self.said()
        self.check_whole()
        if code == 0:
            return "too late"
        if code != CODES[number]:  # the interpreter's own way to end
            begun = any(word in said for word in BEGUN)
            assert code in (1, -number) and not begun, f"{self.kind}: {code}\n{said}"
            return "too early"
        return number.name

    def check_whole(self) -> None:
        """Nothing is torn, and nothing that was there is gone."""
        from slipstream.core.files import lines_of, load_tensors

        steps = [load_tensors(path)["global_step"] for path in self.output.rglob("*.ckpt")]
        files = [path for path in self.output.rglob("*.jsonl") if "metrics" not in path.parts]
        whole = sum(len(lines_of(path)) for path in files)
        ended = sum(path.read_bytes().count(b"\n") for path in files)
        assert whole == ended, f"{self.kind}: {ended - whole} lines are torn"
        assert max(steps, default=0) >= self.steps, f"{self.kind}: a checkpoint is lost"
        assert whole >= self.lines, f"{self.kind}: {self.lines - whole} lines are lost"
        self.steps, self.lines = max(steps, default=0), whole

    def check_tidy(self) -> None:
        left = list(self.output.rglob(".*.unfinished"))
        assert not left, f"{self.kind}: {left} were left"

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


@contextmanager
def small_disk(size: int):
    """A file system of `size` bytes, and a function that makes it larger; None where mounting is
    not permitted."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
        if subprocess.run(options, capture_output=True).returncode:
            yield None, None
            return

        def grow() -> None:
            subprocess.run(["mount", "-o", "remount,size=1g", folder], check=True)

        try:
            yield Path(folder), grow
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def torture(
    kinds: list[str], counts: dict[str, int], seed: int, full: int, in_a_row: int = 4
) -> Counter:
    """End runs of all `kinds` in turn, `in_a_row` times each, until every signal was sent as often
    as `counts` says, then fill `full` disks; returns what was done."""
    from tests.torture_commands import ended_with, make_world

    chance, done = random.Random(seed), Counter()
    places = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    with tempfile.TemporaryDirectory() as folder:
        first = PROCESSES.Process(target=print)  # the imports take longer than any run
        first.start()
        first.join()
        world, expected, seconds = make_world(Path(folder) / "world"), {}, {}
        signals = [number for name, number in SIGNALS.items() for _ in range(counts[name])]
        chance.shuffle(signals)
        order = [kinds[number % len(kinds)] for number in range(-(-len(signals) // in_a_row))]
        for kind in dict.fromkeys(order):
            whole = Trial(kind, world, Path(folder) / f"whole-{kind}")
            started = time.monotonic()
            assert whole.run() == 0, f"{kind}\n{whole.said()}"
            expected[kind], seconds[kind] = (
                ended_with(kind, whole.output),
                time.monotonic() - started,
            )
            print(f"{kind}: {seconds[kind]:.1f} s unharmed", flush=True)
        for number, kind in enumerate(order):
            place = [each for each in places if each.is_dir()][number % 2]
            with tempfile.TemporaryDirectory(dir=place) as own:
                trial = Trial(kind, world, Path(own) / "run")
                for sent in signals[number * in_a_row : (number + 1) * in_a_row]:
                    while (when := trial.end(sent, chance.uniform(0, seconds[kind]))) != sent.name:
                        done[when] += 1
                        if when == "too late":
                            check_equal(trial, expected[kind])
                            shutil.rmtree(trial.output)
                            trial.lines = trial.steps = 0
                    done[when] += 1
                assert trial.run("resume=auto") == 0, f"{kind}\n{trial.said()}"
                check_equal(trial, expected[kind])
                done["bit-equal ends"] += 1
                print(f"{kind} in {place}: bit-equal; {dict(done)}", flush=True)
        for number in range(full):
            kind = kinds[number % len(kinds)]
            size = chance.randrange(20_000, 200_000, 4096)
            while kind in expected and not fill(
                Trial(kind, world, Path()), expected[kind], size, done
            ):
                size //= 2
    return done


def fill(trial: Trial, expected: object, size: int, done: Counter) -> bool:
    """A disk of `size` bytes that is full at some moment, or, where none can be mounted, files of a
    quarter at most; with room again, the same command goes on. Whether it was ever full."""
    with small_disk(size) as (folder, grow):
        most = None if folder else size // 4
        with tempfile.TemporaryDirectory() as other:
            trial.output = (folder or Path(other)) / "run"
            code = trial.run(most_bytes=most)
            if code == 0:
                check_equal(trial, expected)
                return False
            assert code == 2, f"{trial.kind}: {code}\n{trial.said()}"
            assert "resume=auto" in trial.said()
            trial.check_whole()
            if folder:
                grow()
            assert trial.run("resume=auto") == 0, f"{trial.kind}\n{trial.said()}"
            check_equal(trial, expected)
    done["full disks" if most is None else "files at their limit"] += 1
    print(f"{trial.kind} on a full disk: bit-equal", flush=True)
    return True


def check_equal(trial: Trial, expected: object) -> None:
    from tests.torture_commands import ended_with

    trial.check_tidy()
    found = ended_with(trial.kind, trial.output)
    assert found == expected, f"{trial.kind}: it ended with something else\n{trial.said()}"


def main() -> None:
    from tests.torture_commands import KINDS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, count in (
        ("kills", 60),
        ("terms", 20),
        ("interrupts", 20),
        ("full", 10),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    given = parser.parse_args()
    started = time.monotonic()
    counts = {name: getattr(given, name) for name in SIGNALS}
    # What a shell starts in the background ignores Ctrl-C, and so would all that is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    done = torture(given.kinds, counts, given.seed, given.full)
    print(json.dumps({**done, "seconds": round(time.monotonic() - started)}))


if __name__ == "__main__":
    sys.exit(main())
