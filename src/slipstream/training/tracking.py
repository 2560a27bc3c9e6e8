"""What a run is told with: log lines on the terminal, each once, and the W&B logger.

W&B is online when the user is logged in, offline otherwise, and never waits for input.
"""

import csv
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment

from slipstream.core.errors import InputError, first_sentence
from slipstream.core.files import write_atomically
from slipstream.core.settings import Text

log = logging.getLogger(__name__)


class Metrics(CSVLogger):
    """Lightning's CSV log, which with `resume` keeps what the earlier part of the run has logged;
    steps that are repeated come twice."""

    def __init__(self, save_dir: Text, name: str, version: str, resume: Text | None = None):
        super().__init__(save_dir, name, version)
        self.resume = resume

    @property
    @rank_zero_experiment
    def experiment(self):
        path = Path(self.log_dir) / "metrics.csv"
        resumed = self._experiment is None and self.resume is not None
        if resumed and path.exists() and (earlier := path.read_bytes()):
            names = _columns(path, earlier)
            made = super().experiment  # removes the file
            write_atomically(path, lambda file: file.write(earlier))
            made.metrics_keys = names
        return super().experiment


def _columns(path: Path, content: bytes) -> list[str]:
    """The names of a table's columns; `InputError` where this is no table that can be added to."""
    with suppress(ValueError, csv.Error):
        names, *rows = csv.reader(content.decode().splitlines())
        if names and len(set(names)) == len(names) and all(len(row) <= len(names) for row in rows):
            return names
    raise InputError(
        f"resume: {path} is no table of metrics; remove it, or give another output_dir"
    )


def log_once() -> None:
    """Lightning's log lines are printed once, by the root logger if it prints, and without tips."""
    if logging.getLogger().hasHandlers():
        logging.getLogger("lightning").handlers.clear()
    told = logging.getLogger("lightning.pytorch.utilities.rank_zero")  # of its own accord
    told.addFilter(lambda record: not record.getMessage().startswith("💡"))


def wandb_logger(
    project: Text,
    save_dir: Text,
    name: Text | None = None,
    tags: list[Text] | None = None,
    resume: Text | None = None,
) -> WandbLogger:
    """A Lightning `WandbLogger`; `WANDB_MODE` of the environment wins. name, tags: of the run;
    resume: not None where the last run in `save_dir` goes on, unless W&B is offline, where each
    part is a run. `InputError` for what W&B does not take."""
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode is None:
        mode = "online" if _logged_in() else "offline"
    try:
        settings = wandb.Settings(silent=True, init_timeout=30, project=project, mode=mode)
    except (wandb.Error, ValueError) as error:
        said = " ".join(str(error).partition(" [type=")[0].split())
        raise InputError(f"logger.wandb: {said}; mend it, or give logger=csv") from error
    last = (Path(save_dir) / "wandb" / "latest-run").resolve().name  # run-DATE_TIME-ID
    known = re.fullmatch(r"(?:offline-)?run-\d+_\d+-(.+)", last)
    own = known[1] if known and resume is not None and mode == "online" else None
    given = dict(project=project, save_dir=save_dir, name=name, tags=tags, id=own)
    logger = WandbLogger(**given, mode=mode, settings=settings)
    logger._wandb_init.pop("anonymous", None)  # Lightning's None, of which W&B warns
    return logger


def _logged_in() -> bool:
    """Whether W&B knows the user and can be reached; asked without waiting for input."""
    import wandb

    try:
        return wandb.login(prompt=False)
    except wandb.Error as error:
        log.warning("W&B is offline (%s); `wandb sync` sends the run later", first_sentence(error))
        return False


@contextmanager
def followed(loggers: list[WandbLogger], content: dict) -> Iterator[None]:
    """W&B's run with these settings, which ends with the block, and has failed where that raises:
    at the end of a process nothing would wait until it is written. `InputError` where W&B does not
    begin it."""
    for logger in loggers:
        _begin(logger, content)
    failed = True
    try:
        yield
        failed = False
    finally:
        for logger in loggers:
            logger.experiment.finish(exit_code=int(failed))


def _begin(logger: WandbLogger, content: dict) -> None:
    import wandb

    try:
        logger.log_hyperparams(content)
    except wandb.Error as error:
        raise InputError(
            f"logger.wandb: {first_sentence(error)}; set WANDB_MODE=offline, or give logger=csv"
        ) from error


def tracked(loggers: list) -> list[WandbLogger]:
    """W&B's: other loggers stand beside the config that Hydra writes, and the folder itself."""
    return [logger for logger in loggers if isinstance(logger, WandbLogger)]
