"""One table and one picture of a multirun: what each of its comparisons found.

Hydra calls `Collect` when the last run of a sweep has ended; `python -m studies.collect FOLDER`
does the same for runs that are there. It knows nothing but the records that the runs wrote.
"""

import json
import sys
from pathlib import Path
from statistics import fmean, pstdev

from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

from slipstream.core.errors import InputError
from slipstream.results.writer import show, write
from studies import Plot, Result, Rows
from studies.decoding import COLUMNS, columns


class Collect(Callback):
    """title: of the table; against: the method whose mean over all settings the others are held
    against, None for no such table."""

    def __init__(self, title: str = "Runs", against: str | None = None):
        self.title, self.against = title, against

    def on_multirun_end(self, config, **_) -> None:
        collect(Path(config.hydra.sweep.dir), self.title, self.against)


def collect(folder: Path, title: str = "Runs", against: str | None = None) -> Result:
    """Write results.json, table.md and plot.png of all runs below `folder`.

    A row for each run, method and prompt set: what the runs differ in, and what was measured.
    Raises `InputError` where no run wrote a record.
    """
    paths = sorted(folder.glob("*/results.json"), key=lambda path: (len(path.parent.name), path))
    if not paths:
        raise InputError(f"folder: {folder} holds no runs; give the output_dir of a multirun")
    runs = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    given = {path.parent.name: _overrides(path.parent) for path in paths}
    known = dict.fromkeys(name for own in given.values() for name in own)
    names = [name for name in known if len({own.get(name) for own in given.values()}) > 1]
    rows, lines = [], []
    for number, run in runs.items():
        settings = {name: _value(given[number].get(name)) for name in names}
        others = [f"{name} {given[number].get(name)}" for name in names[1:]]
        weights = {"weights, MiB": run["environment"]["weight_bytes"] / 2**20}
        for record in run["results"]:
            of = {"prompts": record["prompt_set"], "method": record["method"]}
            rows.append(settings | of | columns(record, *COLUMNS) | weights)
            # plain decoding is what speeds are relative to, and has no line
            plain = record["method"] == "plain"
            lines.append({"line": None if plain else ", ".join([record["method"], *others])})
    told = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    shown = {title: [{name: row[name] for name in told} for row in rows]}
    if against is not None:
        last = rows[-1]["prompts"]  # the record of all sets
        spread = _spread([row for row in rows if row["prompts"] == last], against)
        shown[f"{title}: over all settings"] = spread
    across = names[0] if names else "method"
    kind = "line" if all(isinstance(row[across], int | float) for row in rows) else "bar"
    plot = Plot(across, ("vs plain", "tokens/s", "tau"), "line", "prompts", kind, reference=1.0)
    rows = [row | line for row, line in zip(rows, lines, strict=True)]
    result = Result(title, rows, (plot,), shown=shown)
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
        return json.loads(text)
    except (ValueError, TypeError):
        return text


def _spread(rows: Rows, against: str) -> Rows:
    """Each method's speed over all settings, beside that of the method `against`."""
    speeds: dict[str, list[float]] = {}
    for row in rows:
        speeds.setdefault(row["method"], []).append(row["tokens/s"])
    mean, spread = fmean(speeds[against]), pstdev(speeds[against])
    return [
        {
            "method": name,
            "tokens/s, mean": fmean(own),
            f"vs {against}": fmean(own) / mean,
            "spread": pstdev(own) / mean,
            f"spread vs {against}": pstdev(own) / spread if spread else None,
            "slowest": min(own) / mean,
        }
        for name, own in speeds.items()
    ]


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
