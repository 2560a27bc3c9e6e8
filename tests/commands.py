"""The two commands as tests call them: compose the config and call what the script calls, or start
the script itself; and what both say of bad input."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from slipstream.core.errors import InputError

ROOT = Path(__file__).parent.parent


def config_of(name: str, *overrides: str) -> DictConfig:
    """The config of `train.py` or `infer.py` with overrides, as Hydra would give it."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def script(name: str, *overrides: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """`python NAME OVERRIDES`, with what it printed; the environment is that of conftest.py."""
    command = [sys.executable, str(ROOT / name), *overrides]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def refused(call) -> str:
    """The one sentence of an `InputError`."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and ". " not in message
    return message
