"""Results as records, a table and a picture: results.json, answers.jsonl, table.md, speedup.png."""

import json
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.core.device import device_name
from slipstream.evaluation.comparison import Record, Run, expected_answers, scores
from slipstream.evaluation.prompts import Prompt

COLUMNS = (
    "method", "prompts", "tokens/s", "vs transformers", "vs plain", "tau", "accepted", "forwards",
    "draft/verify/overhead", "draft ms", "store MB", "identical", "exact",
    "details",
)  # fmt: skip
PACKAGES = ("slipstream", "torch", "transformers", "tokenizers", "lightning", "peft")


def environment(target) -> dict[str, object]:
    """Device, thread count, package versions and commit of this run."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "device": device_name(target.device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "commit": commit(),
    }


def write_report(
    folder: Path,
    records: list[Record],
    runs: list[Run],
    prompts: list[Prompt],
    config: dict,
    environment: dict[str, object],
) -> None:
    """Write results.json, answers.jsonl, table.md and speedup.png into `folder`."""
    content = {
        "config": config,
        "environment": environment,
        "results": [record.as_dict() for record in records],
    }
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    with (folder / "answers.jsonl").open("w", encoding="utf-8") as file:
        for run in runs:
            for line in answer_lines(run, expected_answers(run, runs), prompts):
                file.write(json.dumps(line) + "\n")
    (folder / "table.md").write_text(markdown(records), encoding="utf-8")
    plot(folder / "speedup.png", records)


def answer_lines(
    run: Run, expected: list[list[int]], prompts: list[Prompt]
) -> Iterator[dict[str, object]]:
    """One record per prompt: the answer, its scores and what it took."""
    measured = scores(run.generations, prompts)
    for place, (prompt, answer) in enumerate(zip(prompts, run.generations, strict=True)):
        yield {
            "method": run.method,
            "prompt_set": prompt.source,
            "prompt": prompt.text,
            "answer": answer.text,
            "finished": answer.finished,
            "identical": answer.ids == expected[place],
            "tokens": answer.statistics.tokens,
            "seconds": answer.statistics.seconds,
            "tau": answer.statistics.tau,
            **{name: each and each[place] for name, each in measured.items()},
        }


def cells(record: Record) -> list[str]:
    """One line of the table, as text, in the order of `COLUMNS`."""
    shares = (record.seconds_draft, record.seconds_verify, record.seconds_overhead)
    split = "/".join(f"{100 * share / record.seconds:.0f}" for share in shares) + " %"
    measured = record.seconds_verify > 0
    return [
        record.method,
        str(record.num_prompts),
        f"{record.tokens_per_second:.0f}",
        _times(record.speedup_vs_transformers),
        _times(record.speedup_vs_plain),
        f"{record.tau:.2f}",
        f"{record.mean_accepted_draft_tokens:.2f}",
        str(record.target_forwards),
        split if measured else "-",
        f"{1000 * record.seconds_draft / max(1, record.target_forwards):.2f}" if measured else "-",
        f"{record.store_bytes / 1e6:.2f}" if record.store_bytes else "-",
        f"{record.identical}/{record.num_prompts}",
        "yes" if record.exact else "no",
        record.details,
    ]


def lines_of(records: list[Record]) -> list[list[str]]:
    """The names of the columns and a line for each record; without `details` where there are
    none."""
    lines = [list(COLUMNS), *map(cells, records)]
    return lines if any(record.details for record in records) else [line[:-1] for line in lines]


def markdown(records: list[Record]) -> str:
    """All records as Markdown tables, one per prompt set."""
    parts = []
    for prompt_set in dict.fromkeys(record.prompt_set for record in records):
        columns, *rows = lines_of([each for each in records if each.prompt_set == prompt_set])
        lines = [f"### {prompt_set}", "", "| " + " | ".join(columns) + " |"]
        lines += ["|" + "---|" * len(columns), *("| " + " | ".join(row) + " |" for row in rows)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def print_tables(records: list[Record], console: Console) -> None:
    """The same tables on the terminal."""
    for prompt_set in dict.fromkeys(record.prompt_set for record in records):
        table = Table(title=Text(prompt_set))
        columns, *rows = lines_of([each for each in records if each.prompt_set == prompt_set])
        for place, column in enumerate(columns):
            words = column in ("method", "details")
            table.add_column(column, justify="left" if words else "right", no_wrap=place == 0)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)


def plot(path: Path, records: list[Record]) -> None:
    """Speed of every method on every prompt set, relative to transformers, else to plain decoding,
    else to the first method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sets = list(dict.fromkeys(record.prompt_set for record in records))
    methods = list(dict.fromkeys(record.method for record in records))
    base = next((name for name in ("transformers", "plain") if name in methods), methods[0])
    height = 0.8 / len(sets)
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.32 * len(methods) * len(sets)))
    for place, prompt_set in enumerate(sets):
        chosen = [record for record in records if record.prompt_set == prompt_set]
        (unit,) = [record.tokens_per_second for record in chosen if record.method == base]
        speeds = [record.tokens_per_second / unit for record in chosen]
        rows = [methods.index(record.method) + place * height for record in chosen]
        bars = axes.barh(rows, speeds, height=height * 0.92, label=prompt_set)
        labels = [
            f" {speed:.2f}x, tau {record.tau:.2f}"
            for speed, record in zip(speeds, chosen, strict=True)
        ]
        axes.bar_label(bars, labels, fontsize=8)
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(methods))], methods)
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens per second, relative to {base}")
    axes.margins(x=0.18, y=0.01)
    axes.legend(loc="lower right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def commit() -> str | None:
    """The commit of the source tree, with '+changes' if it is not clean; None outside of git."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=here, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return found + ("+changes" if changes else "")
