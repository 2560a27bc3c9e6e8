"""Steps of a study that are commands of their own: train.py and infer.py, once each."""

import json
import subprocess
import sys
from pathlib import Path

from slipstream.core.errors import InputError
from slipstream.core.files import write_json
from slipstream.results.record import commit

RECORD = "step.json"


def run_step(script: str, overrides: list[str], folder: Path, made: str) -> Path:
    """Run `python <script> <overrides> output_dir=<folder>` and return `folder/made`.

    A step that was finished before, by the same command at the same commit, is not run again. What
    it prints goes to `folder/log.txt`. Raises `InputError` if the command fails, if there is no
    such script in the working directory, or if the folder holds another step.
    """
    record, known = {"command": [script, *overrides], "commit": commit()}, folder / RECORD
    if known.exists():
        if json.loads(known.read_text(encoding="utf-8")) != record:
            raise InputError(
                f"study: {folder} was made with other settings or another commit; give another "
                "study.folder, or delete that one"
            )
        return folder / made
    if not Path(script).exists():
        raise InputError(f"study: it runs {script}; start it from the project's folder")
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, script, *overrides, f"output_dir={folder}"]
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if code or not (folder / made).exists():
        raise InputError(f"study: {' '.join(command[1:])} failed; see {folder / 'log.txt'}")
    write_json(known, record)
    return folder / made
