"""Table 3's form: fine-tuning alone, shared streams, and lossless streams on the fine-tuned target.

All three learn from the same rows in the same number of steps; all are decoded side by side on the
same test rows. Speed is that of the fine-tuned target's plain decoding; quality is compared row by
row with it, in a paired bootstrap.
"""

import json
from pathlib import Path
from statistics import fmean

from rich.progress import track

from slipstream.evaluation.metrics import paired_bootstrap
from slipstream.evaluation.prompts import Prompt
from slipstream.results.record import Plot, Result
from slipstream.speculators.checkpoint import load_speculator
from slipstream.targets.loading import load_target
from slipstream.targets.target import Target
from studies.commands import run_step

METRICS = {"wikisql": "exact_match"}
"""The metric that decides, by task; ROUGE-Lsum for others."""


def applications(
    target: Target,
    prompts: list[Prompt],
    tasks: dict[str, dict],
    seeds: list[int],
    budget: int,
    top_k: int,
    folder: str,
    overrides: list[str],
) -> Result:
    """tasks: by data group, the `path` of its folder (None for the hub), most `rows` that are
    learned from, `steps` of each training, `num_prompts` test rows that are answered; budget,
    top_k: trees of the shared mode, whose pruning is calibrated on validation prompts; folder:
    where models and answers are kept; overrides: of every train.py."""
    rows = []
    for task, settings in track(tasks.items(), description="tasks"):
        folders = [
            _decoded(task, seed, settings, (budget, top_k), Path(folder), overrides)
            for seed in seeds
        ]
        answers = [_answers(each / "answers" / "answers.jsonl") for each in folders]
        for method in ("baseline", "shared", "lossless"):
            extra = _extra_parameters(target, folders[0], method)
            row = {"task": task, "method": method, "steps": settings["steps"]}
            rows.append(row | _measured(task, method, answers) | {"extra parameters": extra})
    plot = Plot("task", ("speedup",), hue="method", kind="bar", label="tau", reference=1.0)
    return Result("Applications (Table 3)", rows, (plot,))


def _decoded(
    task: str, seed: int, settings: dict, tree: tuple[int, int], folder: Path, more: list[str]
) -> Path:
    """Train the three, decode the test rows; the folder with the results."""
    place, (budget, top_k) = folder / task / str(seed), tree
    path = settings["path"]
    common = [f"seed={seed}"] + ([] if path is None else [f"data.path={path}"])

    def train(method: str, *own: str) -> Path:
        steps = settings["steps"]
        overrides = [
            f"experiment=application_{method}", f"hub={task}",
            f"data.max_train_rows={settings['rows']}", f"trainer.max_steps={steps}",
            f"trainer.val_check_interval={steps}", *common, *more, *own,
        ]  # fmt: skip
        return run_step("train.py", overrides, place / method, "model")

    baseline, shared = train("baseline"), train("shared")
    lossless = train("lossless", f"target.adapter={baseline}")
    prompts = [f"hub={task}", *common]
    calibration = [
        "study=pruning", f"study.drafter.speculator={shared}", "study.keep=[0.95]",
        "study.calibration_prompts=16", "num_prompts=32", "data.split=validation",
        f"study.budget={budget}", f"study.drafter.top_k={top_k}", *prompts,
    ]  # fmt: skip
    found = run_step("infer.py", calibration, place / "pruning", "results.json")
    pruning = json.loads(found.read_text(encoding="utf-8"))["results"][0]
    overrides = [
        "methods=application", f"methods.baseline.target.adapter={baseline}",
        f"methods.lossless.target.adapter={baseline}",
        f"methods.lossless.drafter.speculator={lossless}",
        f"methods.shared.drafter.speculator={shared}", f"methods.shared.budget={budget}",
        f"methods.shared.drafter.top_k={top_k}",
        f"methods.shared.drafter.prune_threshold={pruning['threshold']}",
        f"methods.shared.drafter.prune_cap={pruning['cap']}",
        f"num_prompts={settings['num_prompts']}", "repeats=1", *prompts,
    ]  # fmt: skip
    run_step("infer.py", overrides, place / "answers", "answers.jsonl")
    return place


def _answers(path: Path) -> dict[str, list[dict]]:
    """The lines of a run's answers.jsonl by method, in the order of the prompts."""
    found: dict[str, list[dict]] = {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        found.setdefault(line["method"], []).append(line)
    return found


def _measured(task: str, method: str, seeds: list[dict[str, list[dict]]]) -> dict[str, object]:
    """Speed, tau and quality of a method over all seeds, beside the baseline's."""
    metric = METRICS.get(task, "rouge_lsum")
    ours, theirs = ([line for own in seeds for line in own[m]] for m in (method, "baseline"))

    def by_row(name: str) -> list[float]:
        """The metric of each test row, its mean over the seeds."""
        scores = [[line[metric] for line in own[name]] for own in seeds]
        return [fmean(row) for row in zip(*scores, strict=True)]

    def total(lines: list[dict], name: str) -> float:
        return sum(line[name] for line in lines)

    speeds = [total(lines, "tokens") / total(lines, "seconds") for lines in (ours, theirs)]
    forwards = sum((line["tokens"] - 1) / line["tau"] for line in ours if line["tau"])
    low, high = paired_bootstrap(by_row(method), by_row("baseline"))
    means = {
        name: fmean(line[name] for line in ours)
        for name in ("rouge_1", "rouge_lsum", "exact_match")
    }
    return {
        "speedup": speeds[0] / speeds[1],
        "tau": (total(ours, "tokens") - len(ours)) / forwards,
        "identical": total(ours, "identical") / len(ours),
        **means,
        "difference": means[metric] - fmean(line[metric] for line in theirs),
        "95 %": f"{low:+.2f} to {high:+.2f} ({metric})",
        "by seed": ", ".join(f"{fmean(line[metric] for line in own[method]):.2f}" for own in seeds),
    }


def _extra_parameters(target: Target, folder: Path, method: str) -> int:
    """Trained parameters beside the baseline's adapters."""
    if method == "baseline":
        return 0
    if method == "lossless":
        adapter = str(folder / "baseline" / "model")
        target = load_target(target.name, packed=False, adapter=adapter)
    speculator = load_speculator(folder / method / "model", target)
    if method == "lossless":
        return sum(parameter.numel() for parameter in speculator.parameters())
    return speculator.num_extra_parameters()
