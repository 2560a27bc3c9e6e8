"""One table and one picture of a multirun: what each of its comparisons found.

Hydra calls `Collect` when the last run of a sweep has ended; `python -m studies.collect FOLDER`
does the same for runs that are there. It knows nothing but the records that the runs wrote.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

from slipstream.core.errors import InputError
from slipstream.evaluation.metrics import bootstrap
from slipstream.evaluation.report import columns, telling
from slipstream.results.record import bounded
from slipstream.results.writer import show, write
from studies import Plot, Result, Rows
from studies.pairs import answers_of

BOUNDS = {name: (f"{name}_low", f"{name}_high") for name in ("speedup_vs_plain", "tau")}
"""The ends of 95 % of what a record has."""
Model = Callable[[list[tuple[dict, list[dict]]]], dict[str, Rows]]


class Collect(Callback):
    """title: of the table; against: the method whose mean over all settings the others are held
    against, None for no such table; model: what makes a further table of each run's settings and
    records, by its title; None for none."""

    def __init__(self, title: str = "Runs", against: str | None = None, model: Model | None = None):
        self.given = title, against, model
        self.began = 0.0

    def on_multirun_start(self, config, **_) -> None:
        self.began = time.time()

    def on_multirun_end(self, config, **_) -> None:
        collect(Path(config.hydra.sweep.dir), *self.given, since=self.began)


def collect(
    folder: Path,
    title: str = "Runs",
    against: str | None = None,
    model: Model | None = None,
    since: float = 0.0,
) -> Result:
    """Write results.json, table.md and plot.png of all runs below `folder` that ended after `since`
    (a time of files): an earlier sweep may have left others there.

    A row for each run, method and prompt set (of studies their own rows): what the runs differ in,
    and what was measured; the rest as `Collect` has it. Raises `InputError` where no run wrote a
    record.
    """
    paths = sorted(folder.glob("*/results.json"), key=lambda path: (len(path.parent.name), path))
    paths = [path for path in paths if path.stat().st_mtime >= since - 1]
    if not paths:
        raise InputError(f"folder: {folder} holds no runs; give the output_dir of a multirun")
    runs = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    given = {path.parent.name: _overrides(path.parent) for path in paths}
    known = dict.fromkeys(name for own in given.values() for name in own)
    names = [name for name in known if len({own.get(name) for own in given.values()}) > 1]
    rows, tables, found = [], [], []
    for number, run in runs.items():
        settings = {name: _value(given[number].get(name)) for name in names}
        found.append((settings, run["results"]))
        others = [f"{name} {given[number].get(name)}" for name in names[1:]]
        weights = {"weights, MiB": run["environment"]["weight_bytes"] / 2**20}
        for record in run["results"]:
            own, table = next(iter(record.values())), record  # of a study
            if "prompt_set" in record:
                # plain decoding is what speeds are relative to, and has no line
                own = None if record["method"] == "plain" else record["method"]
                table = {"set": record["prompt_set"]} | columns(record) | weights
                record = record | weights
            line = {"line": own and ", ".join([str(own), *others])}
            rows.append(settings | record | settings | line)
            tables.append(settings | table)
    shown = {title: telling(tables)}
    if against is not None:
        shown[f"{title}: over all settings"] = _spread([path.parent for path in paths], against)
    if model is not None:
        shown |= model(found)
    compared = "prompt_set" in found[0][1][0]
    across = names[0] if names else "method" if compared else next(iter(rows[0]))
    kind = "line" if all(isinstance(row[across], int | float) for row in rows) else "bar"
    if compared:
        panels = "speedup_vs_plain", "tokens_per_second", "tau"
        plot = Plot(across, panels, "line", "prompt_set", kind, BOUNDS, reference=1.0)
    else:  # what a study's rows have first of numbers
        measured = [name for name in rows[0] if name not in (across, *names)]
        numbers = [n for n in measured if all(isinstance(row.get(n), int | float) for row in rows)]
        plot = Plot(across, tuple(numbers[:3]), "line", kind=kind)
    result = Result(title, rows, (plot,) if plot.y else (), shown=shown)
    show(result)
    parts = "config", "environment"
    write(folder, result, *({name: run[part] for name, run in runs.items()} for part in parts))
    return result


def _overrides(folder: Path) -> dict[str, str]:
    """What a run was given on its command line, or by its sweep, as Hydra notes it."""
    given = OmegaConf.to_container(OmegaConf.load(folder / "config" / "overrides.yaml"))
    return dict(each.lstrip("+~").split("=", 1) for each in given if "=" in each)


def _value(text: str | None) -> object:
    try:
        return "none" if (value := json.loads(text)) is None else value
    except (ValueError, TypeError):
        return text


def _spread(folders: list[Path], against: str) -> Rows:
    """Each method's mean speed over all settings, beside that of the method `against`, with 95 %
    over prompts; and how far it spreads over the settings."""
    columns: dict[str, list[list[float]]] = {}  # of each setting the tokens and seconds of answers
    for folder in folders:
        for name, own in answers_of(folder).items():
            for column in ("tokens", "seconds"):
                columns.setdefault(name, []).append([answer[column] for answer in own])
    base = _speeds(columns[against])
    rows = []
    for name, own in columns.items():
        speeds = _speeds(own)
        rows.append(
            {
                "method": name,
                "tokens/s, mean": float(speeds.mean()),
                f"vs {against}": (ratio := float(speeds.mean() / base.mean())),
                f"vs {against}, 95 %": bounded(ratio, *bootstrap(_ratio, *own, *columns[against])),
                "spread": float(speeds.std() / base.mean()),
                f"spread vs {against}": float(speeds.std() / base.std()) if base.std() else None,
                "slowest": float(speeds.min() / base.mean()),
            }
        )
    return rows


def _speeds(columns: Sequence[Sequence[float]], axis: int = -1) -> np.ndarray:
    """(settings, ...) tokens a second; columns: tokens and seconds in turn, a pair a setting."""
    sums = np.sum(columns, axis)
    return sums[::2] / sums[1::2]


def _ratio(*columns: Sequence[float], axis: int = -1) -> np.ndarray:
    """Mean speed over settings of the first half of the columns, divided by the second half's."""
    ours, theirs = np.split(_speeds(columns, axis), 2)
    return ours.mean(0) / theirs.mean(0)


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
