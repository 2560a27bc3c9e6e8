"""The processes of one run: they start before the data is prepared, so that they share that work,
too, and they end together."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import lightning as L
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from slipstream.core.errors import InputError
from slipstream.core.resuming import BY_CTRL_C, TERMINATED, how_to_go_on

LOOK_SECONDS, WAIT_SECONDS, SAVE_SECONDS = 0.5, 2.0, 60.0
"""Seconds between two looks at the others; from the loss of one to the end of this process, which
may end first with its own message; the same if that one was told to end: this one is saving."""


def launch(trainer: L.Trainer, output: Path) -> None:
    """Start the other processes of a run now, where Lightning would when it fits, and watch over
    them. Raises `InputError` for more processes on a CPU than it has cores."""
    # two can be tried anywhere
    most = max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    if isinstance(trainer.accelerator, CPUAccelerator) and trainer.num_devices > most:
        raise InputError(
            f"trainer.devices: {trainer.num_devices} processes on a CPU would wait for one another "
            f"here; give at most {most}"
        )
    launcher = trainer.strategy.launcher
    if trainer.world_size == 1 or not isinstance(launcher, _SubprocessScriptLauncher):
        return
    if not launcher.cluster_environment.creates_processes_externally:
        launcher._call_children_scripts()  # as `launch` does, whose observer kills without a word
        procs = launcher.procs
        _watch(lambda: next(filter(None, (each.poll() for each in procs)), 0), procs, output)
    elif launcher.cluster_environment.local_rank() and "TORCHELASTIC_RUN_ID" not in os.environ:
        parent = os.getppid()
        _watch(lambda: int(os.getppid() != parent), [], output)
    trainer.strategy.set_world_ranks()
    os.environ |= {"RANK": str(trainer.global_rank), "WORLD_SIZE": str(trainer.world_size)}


def end_after(seconds: float, output: Path) -> threading.Timer:
    """End this process after so many seconds, unless the returned timer is cancelled before."""
    why = f"this process was told to end, and the others did not answer for {seconds:.0f} s"
    timer = threading.Timer(seconds, end_alone, [output, why])
    timer.daemon = True
    timer.start()
    return timer


def end_alone(
    output: Path, why: str = "another process of this run was lost, so this one ends, too"
) -> None:
    """End this process, whatever it waits for, and say why."""
    print(  # behind a progress bar that the other one has begun
        f"\nerror: {why}; "
        f"{how_to_go_on(output)}, with as many processes as you like",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    os._exit(1)


def _watch(lost: Callable[[], int], others: list[subprocess.Popen], output: Path) -> None:
    """In a thread: end this process, and the others, after `lost` gives an exit code."""

    def look() -> None:
        while not (code := lost()):
            time.sleep(LOOK_SECONDS)
        time.sleep(SAVE_SECONDS if code in (TERMINATED, BY_CTRL_C) else WAIT_SECONDS)
        for other in others:
            other.kill()
        end_alone(output)

    threading.Thread(target=look, daemon=True, name="others").start()
