"""How the scripts begin and end: Hydra's own errors, and ours, as one sentence."""

import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from slipstream import app
from slipstream.configuration import RENAMED, REPLACED
from slipstream.core.errors import InputError
from slipstream.core.settings import nearest


def run(main: Callable[[], None]) -> None:
    """Run a Hydra entry point; one sentence ends it for what Hydra refuses: a config that cannot be
    composed, and a folder that cannot be written."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        main()
    except InputError:  # of runs of a multirun, each of which has said it
        sys.exit(2)
    except Exception as error:
        # Hydra makes the folder and a log file in it before anything of ours runs.
        called = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
        if app.__file__ in called:
            raise
        theirs = isinstance(error, HydraException | OmegaConfBaseException)
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError) and not theirs:
            place = f"{cause.filename} ({cause.strerror})"
            _stop(f"output_dir: cannot write to {place}; choose another folder")
        if not (theirs or isinstance(error, ValueError | AssertionError)):
            raise
        said = str(error).strip().partition("\n")[0].rstrip(".:").replace(". ", ": ")
        said = said or "hydra: a key below it has a value that Hydra does not take"
        _stop(f"config: {said}; {_remedy(error)}")


def _remedy(error: Exception) -> str:
    """What to do about a config that cannot be composed: of its group, take what is nearest."""
    overridden = re.search(r"Could not override '([\w.]+)'", str(error))
    for key, successor in REPLACED.items():
        if overridden and f"{overridden[1]}.".startswith(f"{key}."):
            return f"in its place is {successor}"
    beside = getattr(error.__cause__, "parent_node", None)
    if overridden and isinstance(beside, DictConfig):
        return nearest(overridden[1].rpartition(".")[2], [str(key) for key in beside])
    if isinstance(error, OverrideParseException) or "Ambiguous value" in str(error):
        return (
            "a value with brackets, commas, quotes or ~ is quoted for the shell and for Hydra, "
            "as \"prompt='What\\'s [this], then?'\""
        )
    name = getattr(error, "missing_cfg_file", None) or ""
    if name in RENAMED:
        return f"it is now {RENAMED[name]}"
    group, _, missing = name.partition("/")
    if group == "target" and "/" in missing:
        return f"for a folder or a hub id give target=hub target.name={missing}"
    searched = re.search(r"provider=main, path=file://(.+)", str(error))
    folder = Path(searched[1]) / group if searched and missing else None
    if folder is None or not folder.is_dir():
        return "check its spelling against conf/ (unknown keys are errors, also with +)"
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")]
    return f"the nearest is {group}={difflib.get_close_matches(missing, names, 1, 0.0)[0]}"


@contextmanager
def one_sentence() -> Iterator[None]:
    """Bad input ends with its one sentence and exit code 2, no traceback; Ctrl-C with 130. The
    other runs of a multirun go on first."""
    try:
        yield
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        if _in_multirun():
            raise
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if _in_multirun() and "wandb" in sys.modules:  # for W&B, too, the next run is another one
            sys.modules["wandb"].finish(exit_code=int(sys.exc_info()[0] is not None))


def _stop(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def in_own_folder(config: DictConfig) -> DictConfig:
    """In a multirun each run has a folder of its own below `output_dir`."""
    if _in_multirun():
        sweep = HydraConfig.get().sweep
        config.output_dir = f"{sweep.dir}/{sweep.subdir}"
    return config


def _in_multirun() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
