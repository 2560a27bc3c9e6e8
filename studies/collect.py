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
from slipstream.results.record import Plot, Result, Rows
from slipstream.results.writer import show, write

NUMBERS = {
    "tokens/s": "tokens_per_second",
    "vs plain": "speedup_vs_plain",
    "tau": "tau",
    "prefill, s": "seconds_prefill",
    "draft, s": "seconds_draft",
    "verify, s": "seconds_verify",
    "other, s": "seconds_overhead",
    "ROUGE-Lsum": "rouge_lsum",
    "exact match": "exact_match",
}
"""Columns, and fields of a comparison's records."""
LINE = "line"


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
    rows: Rows = [
        {name: _number(given[number].get(name)) for name in names}
        | {"prompts": record["prompt_set"], "method": record["method"]}
        | {column: record[field] for column, field in NUMBERS.items()}
        | {
            "weights, MiB": run["environment"]["weight_bytes"] / 2**20,
            "identical": f"{record['identical']}/{record['num_prompts']}",
            # plain decoding is what speeds are relative to
            LINE: None if record["method"] == "plain" else _line(record, given[number], names[1:]),
        }
        for number, run in runs.items()
        for record in run["results"]
    ]
    told = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    shown = {title: [{name: row[name] for name in told if name != LINE} for row in rows]}
    if against is not None:
        last = rows[-1]["prompts"]  # the record of all sets
        spread = _spread([row for row in rows if row["prompts"] == last], against)
        shown[f"{title}: over all settings"] = spread
    across = names[0] if names else "method"
    kind = "line" if all(isinstance(row[across], int | float) for row in rows) else "bar"
    plot = Plot(across, ("vs plain", "tokens/s", "tau"), LINE, "prompts", kind, reference=1.0)
    result = Result(title, rows, (plot,), shown=shown)
    show(result)
    configs, environments = (
        {number: run[part] for number, run in runs.items()} for part in ("config", "environment")
    )
    write(folder, result, configs, environments)
    return result


def _line(record: dict, given: dict[str, str], names: list[str]) -> str:
    """What a line of the picture is called."""
    return ", ".join([record["method"], *(f"{name} {given.get(name)}" for name in names)])


def _overrides(folder: Path) -> dict[str, str]:
    """What a run was given on its command line, or by its sweep, as Hydra notes it."""
    given = OmegaConf.to_container(OmegaConf.load(folder / "config" / "overrides.yaml"))
    return dict(each.lstrip("+~").split("=", 1) for each in given if "=" in each)


def _number(text: str | None) -> object:
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
