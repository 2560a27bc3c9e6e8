"""Table 3's form: fine-tuning alone, shared streams, and lossless streams on the fine-tuned target.

All three learn from the same rows in the same number of steps; all are decoded side by side on the
same test rows. Speed is that of the fine-tuned target's plain decoding; quality is compared row by
row with it, in a paired bootstrap.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import pandas as pd
from rich.progress import track
from safetensors import safe_open

from slipstream.core.errors import InputError
from slipstream.core.files import write_json
from slipstream.core.settings import Budget, Seed, Size, Text
from slipstream.evaluation.metrics import bootstrap, rate_interval, ratio_interval
from slipstream.results.record import bounded, commit
from slipstream.speculators.checkpoint import WEIGHTS
from studies import Plot, Prompt, Result, Target

# The metric that decides, by task; ROUGE-Lsum for others.
METRICS = {"wikisql": "exact_match"}
# How each is trained: plain fine-tuning, streams that learn with the target, streams on the first.
TRAINING = {
    "baseline": ["experiment=[fine_tuning,application]", "training.learning_rate=1e-3"],
    "shared": ["experiment=application_shared"],
    "lossless": ["experiment=application", "speculator.adapter_rank=32", "data.regenerate=true",
                 "training.learning_rate=4e-3"],
}  # fmt: skip
QUALITY = "rouge_1", "rouge_lsum", "exact_match"


def applications(
    target: Target,
    prompts: list[Prompt],
    tasks: dict[str, dict],
    seeds: Sequence[Seed],
    budget: Budget,
    top_k: Size,
    folder: Text,
    overrides: Sequence[Text],
) -> Result:
    """The settings of `tasks` are explained in conf/study/applications.yaml; budget, top_k: trees
    of the shared mode; overrides: of every train.py."""
    rows = []
    for task, settings in track(tasks.items(), description="tasks"):
        answers, path = [], settings["path"]
        for seed in seeds:
            place = Path(folder) / task / str(seed)
            common = [f"hub={task}", f"seed={seed}"] + ([f"data.path={path}"] if path else [])
            models = _train(place, settings, [*common, *overrides])
            found = _decode(place, models, settings["num_prompts"], budget, top_k, common)
            answers.append(found.assign(seed=seed))
        lines = pd.concat(answers)
        for method, model in models.items():
            row = {"task": task, "method": method, "steps": settings["steps"]}
            extra = {"extra parameters": _extra_parameters(model)}
            rows.append(row | measured(lines, method, METRICS.get(task, "rouge_lsum")) | extra)
    plot = Plot("task", ("speedup",), hue="method", kind="bar", label="tau", reference=1.0)
    return Result("Applications (Table 3)", rows, (plot,))


def _train(folder: Path, settings: dict, given: list[str]) -> dict[str, Path]:
    """The folders of the three models, by method."""
    steps, found = settings["steps"], {}
    for method, own in TRAINING.items():
        overrides = [
            *own, f"data.max_train_rows={settings['rows']}",
            f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps}", *given,
        ]  # fmt: skip
        if method == "lossless":
            overrides.append(f"target.adapter={found['baseline']}")
        found[method] = run_step("train.py", overrides, folder / method, "model")
    return found


def _decode(
    folder: Path, models: dict[str, Path], count: int, budget: int, top_k: int, given: list[str]
) -> pd.DataFrame:
    """Calibrate the pruning of the shared mode, and answer `count` test rows by all three: a line
    for each method and `row`."""
    calibration = [
        "study=pruning", f"study.drafter.speculator={models['shared']}", "study.keep=[0.95]",
        "study.calibration_prompts=16", "num_prompts=32", "data.split=validation",
        f"study.budget={budget}", f"study.drafter.top_k={top_k}", *given,
    ]  # fmt: skip
    found = run_step("infer.py", calibration, folder / "pruning", "results.json")
    pruning = json.loads(found.read_text(encoding="utf-8"))["results"][0]
    shared, lossless = "methods.shared", "methods.lossless"
    overrides = [
        "methods=application", f"methods.baseline.target.adapter={models['baseline']}",
        f"{lossless}.target.adapter={models['baseline']}",
        f"{lossless}.drafter.speculator={models['lossless']}",
        f"{shared}.drafter.speculator={models['shared']}", f"{shared}.budget={budget}",
        f"{shared}.drafter.top_k={top_k}", f"{shared}.drafter.prune_cap={pruning['cap']}",
        f"{shared}.drafter.prune_threshold={pruning['threshold']}",
        f"num_prompts={count}", "repeats=1", *given,
    ]  # fmt: skip
    found = run_step("infer.py", overrides, folder / "answers", "answers.jsonl")
    lines = pd.DataFrame(map(json.loads, found.read_text(encoding="utf-8").splitlines()))
    return lines.assign(row=lines.groupby("method").cumcount())


def run_step(script: str, overrides: list[str], folder: Path, made: str) -> Path:
    """Run `python <script> <overrides> output_dir=<folder>` and return `folder/made`.

    A step that was finished before, by the same command at the same commit, is not run again while
    what it made is there (sources that were changed since have no commit, and no step is taken for
    theirs). What it prints goes to `folder/log.txt`. Raises `InputError` if the command fails, if
    there is no such script in the working directory, or if the folder holds another step.
    """
    record, known = {"command": [script, *overrides], "commit": commit()}, folder / "step.json"
    if known.exists():
        unknown = record["commit"] is None or record["commit"].endswith("+changes")
        if unknown or json.loads(known.read_text(encoding="utf-8")) != record:
            raise InputError(
                f"study: {folder} was made with other settings or another commit, or with changes "
                "that no commit has; give another study.folder, or delete that one"
            )
        if (folder / made).exists():
            return folder / made
    if not Path(script).exists():
        raise InputError(f"study: it runs {script}; start it from the project's folder")
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, script, *overrides, f"output_dir={folder}"]
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if code or not (folder / made).exists():
        raise InputError(f"study: {' '.join(command[1:])} failed; see {folder / 'log.txt'}")
    write_json(known, record)
    return folder / made


def measured(lines: pd.DataFrame, method: str, metric: str) -> dict[str, object]:
    """Speed, tau and quality of a method over all seeds, beside the baseline's."""
    own, usual = (lines[lines["method"] == name] for name in (method, "baseline"))
    # one number for each test row, all seeds together: rows are drawn again, not answers
    sums = [each.groupby("row")[["tokens", "seconds"]].sum() for each in (own, usual)]
    speedup, *ends = ratio_interval(*((each["tokens"], each["seconds"]) for each in sums))
    drafted = own[own["tau"] > 0].assign(after=lambda each: each["tokens"] - 1)
    drafted = drafted.assign(forwards=drafted["after"] / drafted["tau"])
    steps = drafted.groupby("row")[["after", "forwards"]].sum()
    tau = steps["after"].sum() / steps["forwards"].sum()
    # of each test row the mean over the seeds
    ours, theirs = (each.groupby("row")[metric].mean() for each in (own, usual))
    low, high = bootstrap(np.mean, ours.to_numpy() - theirs.to_numpy())
    return {
        "speedup": speedup,
        "speedup, 95 %": bounded(speedup, *ends),
        "tau": tau,
        "tau, 95 %": bounded(tau, *rate_interval(steps["after"], steps["forwards"])),
        "identical": own["identical"].mean(),
        **own[[*QUALITY]].mean(),
        "difference": ours.mean() - theirs.mean(),
        "difference, 95 %": f"{low:+.2f} to {high:+.2f} ({metric})",
        "by seed": ", ".join(
            f"{mean:.2f}" for mean in own.groupby("seed", sort=False)[metric].mean()
        ),
    }


def _extra_parameters(model: Path) -> int:
    """Trained parameters of a speculator beside LoRA, which the baseline has, too."""
    if not (model / WEIGHTS).exists():
        return 0
    with safe_open(model / WEIGHTS, "pt") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return sum(prod(shape) for name, shape in shapes.items() if not name.startswith("lora."))
