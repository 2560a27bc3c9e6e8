"""Steps of a study that are commands of their own: train.py and infer.py, once each."""

import subprocess
import sys
from pathlib import Path

from slipstream.core.errors import InputError


def run_step(script: str, overrides: list[str], folder: Path, made: str) -> Path:
    """Run `python <script> <overrides> output_dir=<folder>`, unless `folder/made` exists already.

    What it prints goes to `folder/log.txt`. Returns `folder/made`; raises `InputError` if the
    command fails, or if there is no such script in the working directory.
    """
    result = folder / made
    if result.exists():
        return result
    if not Path(script).exists():
        raise InputError(f"study: it runs {script}; start it from the project's folder")
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, script, *overrides, f"output_dir={folder}"]
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if code or not result.exists():
        raise InputError(f"study: {' '.join(command[1:])} failed; see {folder / 'log.txt'}")
    return result
