"""Table 3's form: fine-tuning alone, shared streams, and lossless streams on the fine-tuned target.

All three learn from the same rows in the same number of steps; all are decoded side by side on the
same test rows. Speed is that of the fine-tuned target's plain decoding; quality is compared row by
row with it, in a paired bootstrap.
"""

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from rich.progress import track

from slipstream.evaluation.metrics import paired_bootstrap
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.evaluation.studies.steps import run_step
from slipstream.speculators.checkpoint import load_speculator
from slipstream.targets.loading import load_target
from slipstream.targets.target import Target

METRICS = {"wikisql": "exact_match"}
"""The metric that decides, by task; ROUGE-Lsum for others."""


@dataclass(frozen=True)
class Task:
    """path: folder with its rows, None for the hub; rows: most that are learned from; steps: of
    each training; num_prompts: test rows that are answered."""

    path: str | None
    rows: int
    steps: int
    num_prompts: int


class ApplicationStudy:
    """tasks: data group -> the fields of its `Task`; budget, top_k: trees of the shared mode, whose
    pruning is calibrated on validation prompts; folder: where models and answers are kept;
    overrides: of every train.py."""

    def __init__(
        self,
        tasks: dict[str, dict],
        seeds: list[int],
        budget: int,
        top_k: int,
        folder: str,
        overrides: list[str],
    ):
        self.tasks = {name: Task(**fields) for name, fields in tasks.items()}
        self.seeds, self.budget, self.top_k = seeds, budget, top_k
        self.folder, self.overrides = Path(folder), list(overrides)

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        runs = list(product(self.tasks, self.seeds))
        found = {
            (task, seed): self._decoded(task, seed)
            for task, seed in track(runs, description="tasks and seeds")
        }
        rows = []
        for task in self.tasks:
            decoded = [found[task, seed] for seed in self.seeds]
            for method in ("baseline", "shared", "lossless"):
                rows.append(self._row(target, task, method, [answers(path) for path in decoded]))
        return Findings("Applications (Table 3)", rows, lambda figure: _draw(figure, rows))

    def _decoded(self, name: str, seed: int) -> Path:
        """Train the three, decode the test rows; the folder with the results."""
        place, task = self.folder / name / str(seed), self.tasks[name]
        common = [f"seed={seed}"] + ([] if task.path is None else [f"data.path={task.path}"])

        def train(method: str, *more: str) -> Path:
            overrides = [
                f"experiment=application_{method}",
                f"hub={name}",
                f"data.max_train_rows={task.rows}",
                f"trainer.max_steps={task.steps}",
                f"trainer.val_check_interval={task.steps}",
                *common,
                *self.overrides,
                *more,
            ]
            return run_step("train.py", overrides, place / method, "model")

        baseline, shared = train("baseline"), train("shared")
        lossless = train("lossless", f"target.adapter={baseline}")
        prompts = [f"hub={name}", *common]
        tree = [f"study.budget={self.budget}", f"study.drafter.top_k={self.top_k}"]
        pruning = _calibrated(shared, [*prompts, *tree], place / "pruning")
        overrides = [
            "methods=application",
            f"methods.baseline.target.adapter={baseline}",
            f"methods.lossless.target.adapter={baseline}",
            f"methods.lossless.drafter.speculator={lossless}",
            f"methods.shared.drafter.speculator={shared}",
            f"methods.shared.budget={self.budget}",
            f"methods.shared.drafter.top_k={self.top_k}",
            f"methods.shared.drafter.prune_threshold={pruning['threshold']}",
            f"methods.shared.drafter.prune_cap={pruning['cap']}",
            f"num_prompts={task.num_prompts}",
            "repeats=1",
            *prompts,
        ]
        run_step("infer.py", overrides, place / "answers", "answers.jsonl")
        return place

    def _row(self, target: Target, task: str, method: str, seeds: list[dict]) -> dict:
        metric = METRICS.get(task, "rouge_lsum")
        ours = [line for lines in seeds for line in lines[method]]
        theirs = [line for lines in seeds for line in lines["baseline"]]
        row = {
            "task": task,
            "method": method,
            "steps": self.tasks[task].steps,
            "speedup": _speed(ours) / _speed(theirs),
            "tau": _tau(ours),
            "identical": sum(line["identical"] for line in ours) / len(ours),
        }
        for name in ("rouge_1", "rouge_lsum", "exact_match"):
            row[name] = fmean(line[name] for line in ours)
        low, high = paired_bootstrap(
            _by_row(seeds, method, metric), _by_row(seeds, "baseline", metric)
        )
        means = [fmean(line[metric] for line in lines[method]) for lines in seeds]
        return row | {
            "difference": row[metric] - fmean(line[metric] for line in theirs),
            "95 %": f"{low:+.2f} to {high:+.2f} ({metric})",
            "by seed": ", ".join(f"{mean:.2f}" for mean in means),
            "extra parameters": self._extra(target, task, method),
        }

    def _extra(self, target: Target, task: str, method: str) -> int | None:
        """Trained parameters beside the baseline's adapters."""
        place = self.folder / task / str(self.seeds[0])
        if method == "baseline":
            return 0
        if method == "lossless":
            adapter = str(place / "baseline" / "model")
            target = load_target(target.name, packed=False, adapter=adapter)
        speculator = load_speculator(place / method / "model", target)
        own = speculator.num_adapter_parameters() if method == "lossless" else 0
        return speculator.num_extra_parameters() + own


def _calibrated(speculator: Path, options: list[str], folder: Path) -> dict:
    """Pruning threshold and cap for fused streams, chosen on validation prompts."""
    overrides = [
        "experiment=evidence/pruning",
        f"study.drafter.speculator={speculator}",
        "study.keep=[0.95]",
        "study.calibration_prompts=16",
        "num_prompts=32",
        "data.split=validation",
        *options,
    ]
    found = run_step("infer.py", overrides, folder, "findings.json")
    return json.loads(found.read_text(encoding="utf-8"))["rows"][0]


def _by_row(seeds: list[dict[str, list[dict]]], method: str, metric: str) -> list[float]:
    """The metric of each test row, its mean over the seeds."""
    scores = [[line[metric] for line in lines[method]] for lines in seeds]
    return [fmean(row) for row in zip(*scores, strict=True)]


def answers(folder: Path) -> dict[str, list[dict]]:
    """The lines of a run's answers.jsonl by method, in the order of the prompts."""
    found: dict[str, list[dict]] = {}
    with (folder / "answers" / "answers.jsonl").open(encoding="utf-8") as file:
        for line in map(json.loads, file):
            found.setdefault(line["method"], []).append(line)
    return found


def _speed(lines: list[dict]) -> float:
    return sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines)


def _tau(lines: list[dict]) -> float:
    """Tokens per target forward over all lines."""
    forwards = sum((line["tokens"] - 1) / line["tau"] for line in lines if line["tau"])
    return sum(line["tokens"] - 1 for line in lines) / forwards


def _draw(figure, rows: list[dict]) -> None:
    axes = figure.subplots()
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for place, method in enumerate(methods):
        chosen = [row for row in rows if row["method"] == method]
        bars = axes.bar(
            [tasks.index(row["task"]) + place * 0.27 for row in chosen],
            [row["speedup"] for row in chosen],
            width=0.25,
            label=method,
        )
        axes.bar_label(bars, [f"tau {row['tau']:.2f}" for row in chosen], fontsize=8)
    axes.set_xticks([place + 0.27 for place in range(len(tasks))], tasks)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_ylabel("speed against the baseline's plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
