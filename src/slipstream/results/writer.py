"""The one way results leave the program: results.json, table.md, plot.png, and the terminal."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.core.errors import InputError
from slipstream.core.files import write_json, write_text
from slipstream.results.picture import draw
from slipstream.results.record import Result, Rows, cell


def write(folder: Path, result: Result, config: dict, environment: dict[str, object]) -> None:
    """Write the record with its full configuration, the tables, the picture and further files."""
    content = {
        "title": result.title,
        "config": config,
        "environment": environment,
        "results": result.rows,
        "more": result.more,
    }
    write_json(folder / "results.json", content)
    write_text(folder / "table.md", markdown(result) + _streams(environment))
    for name, text in result.files.items():
        write_text(folder / name, text)
    if result.plots:
        draw(folder / "plot.png", result)
    made = ["table.md", *(["plot.png"] if result.plots else [])]
    made += dict.fromkeys(name.partition("/")[0] for name in result.files)
    print(", ".join([f"results: {folder}/results.json", *made]))


def check_replaceable(folder: Path) -> None:
    """`InputError` for a results.json in the way of `write` that is no record of this project."""
    path = folder / "results.json"
    if not path.is_file():
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not {"config", "environment", "results"} <= content.keys():
        raise InputError(
            f"output_dir: {path} is no record of this project, and would be replaced; choose "
            "another folder"
        )


def markdown(result: Result) -> str:
    """All tables with their titles, as Markdown."""
    return "\n".join(f"### {title}\n\n{_lines(rows)}" for title, rows in result.tables.items())


def _streams(environment: dict[str, object]) -> str:
    """A line for each speculator of the run, or of several: which additions its streams have."""
    runs = [run for run in (environment, *environment.values()) if isinstance(run, dict)]
    found = {name: own for run in runs for name, own in run.get("streams", {}).items()}
    line = "\nAdditions to the paper in `{}`: {}{}.\n"
    alone = " (the root where streams are deferred alone)"
    return "".join(
        line.format(name, ", ".join(own) or "none", alone if "root" in own else "")
        for name, own in found.items()
    )


def _lines(rows: Rows) -> str:
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(map(cell, row.values())) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def show(result: Result, console: Console | None = None) -> None:
    """The same tables on the terminal."""
    console = console or Console(width=None if Console().is_terminal else 180)
    for title, rows in result.tables.items():
        table = Table(title=Text(title))
        for place, (name, value) in enumerate(rows[0].items()):
            left = isinstance(value, str) and place in (0, len(rows[0]) - 1)
            justify = "left" if left else "right"
            table.add_column(Text(name), justify=justify, no_wrap=place == 0)
        for row in rows:
            table.add_row(*(Text(cell(value)) for value in row.values()))
        console.print(table)
