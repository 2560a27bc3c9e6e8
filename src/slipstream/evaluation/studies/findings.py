"""What a study found: rows of a table, written as findings.json, table.md and plot.png."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.report import environment
from slipstream.targets.target import Target


@dataclass(frozen=True)
class Findings:
    """rows: one dict per line, all with the same keys; draw: puts the picture on a figure; more:
    further tables, by title; files: further texts to be written, by name."""

    title: str
    rows: list[dict[str, object]]
    draw: Callable
    more: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


class Study(Protocol):
    """An experiment of its own, in place of a comparison: `study=NAME` of infer.py."""

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        """Measure; shows a progress bar where it takes long."""


def markdown(rows: list[dict[str, object]]) -> str:
    """A Markdown table of `rows`."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(map(_text, row.values())) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def tables(findings: Findings) -> str:
    """All tables with their titles, as Markdown."""
    found = {findings.title: findings.rows} | findings.more
    return "\n".join(f"### {title}\n\n{markdown(rows)}" for title, rows in found.items())


def write_findings(folder: Path, findings: Findings, config: dict, target: Target) -> None:
    """Write the three files into `folder`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    content = {
        "title": findings.title,
        "config": config,
        "environment": environment(target),
        "rows": findings.rows,
        "more": findings.more,
    }
    (folder / "findings.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(tables(findings), encoding="utf-8")
    for name, text in findings.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    figure = plt.figure(figsize=(9, 4.5), layout="constrained")
    findings.draw(figure)
    figure.savefig(folder / "plot.png", dpi=150)
    plt.close(figure)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if type(value) is int:
        return f"{value:,}"
    return "-" if value is None else str(value)
