"""Table 3's form: fine-tuning alone, shared streams, and lossless streams on the fine-tuned target.

All three learn from the same rows in the same number of steps; all are decoded side by side on the
same test rows. Speed is that of the fine-tuned target's plain decoding; quality is compared row by
row with it, in a paired bootstrap.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from rich.progress import track

from slipstream.core.errors import InputError
from slipstream.core.files import write_json
from slipstream.evaluation.metrics import paired_bootstrap
from slipstream.results.record import commit
from slipstream.speculators.checkpoint import load_speculator
from slipstream.targets.loading import load_target
from studies import Plot, Prompt, Result, Target

# The metric that decides, by task; ROUGE-Lsum for others.
METRICS = {"wikisql": "exact_match"}
QUALITY = "rouge_1", "rouge_lsum", "exact_match"


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
    """The settings of `tasks` are explained in conf/study/applications.yaml; budget, top_k: trees
    of the shared mode; overrides: of every train.py."""
    rows = []
    for task, settings in track(tasks.items(), description="tasks"):
        folders = [Path(folder) / task / str(seed) for seed in seeds]
        for place in folders:
            path = settings["path"]
            common = [f"hub={task}", f"seed={place.name}"] + ([f"data.path={path}"] if path else [])
            models = _train(place, settings, [*common, *overrides])
            _decode(place, models, settings["num_prompts"], budget, top_k, common)
        answers = [_answers(place / "answers" / "answers.jsonl") for place in folders]
        for method in ("baseline", "shared", "lossless"):
            row = {"task": task, "method": method, "steps": settings["steps"]}
            extra = {"extra parameters": _extra_parameters(target, folders[0], method)}
            rows.append(row | _measured(METRICS.get(task, "rouge_lsum"), method, answers) | extra)
    plot = Plot("task", ("speedup",), hue="method", kind="bar", label="tau", reference=1.0)
    return Result("Applications (Table 3)", rows, (plot,))


def _train(folder: Path, settings: dict, given: list[str]) -> dict[str, Path]:
    """The folders of the three models, by method."""
    steps, found = settings["steps"], {}
    for method in ("baseline", "shared", "lossless"):
        own = [f"target.adapter={found['baseline']}"] if method == "lossless" else []
        overrides = [
            f"experiment=application_{method}", f"data.max_train_rows={settings['rows']}",
            f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps}", *given, *own,
        ]  # fmt: skip
        found[method] = run_step("train.py", overrides, folder / method, "model")
    return found


def _decode(
    folder: Path, models: dict[str, Path], count: int, budget: int, top_k: int, given: list[str]
) -> None:
    """Calibrate the pruning of the shared mode, and answer `count` test rows by all three."""
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
    run_step("infer.py", overrides, folder / "answers", "answers.jsonl")


def run_step(script: str, overrides: list[str], folder: Path, made: str) -> Path:
    """Run `python <script> <overrides> output_dir=<folder>` and return `folder/made`.

    A step that was finished before, by the same command at the same commit, is not run again. What
    it prints goes to `folder/log.txt`. Raises `InputError` if the command fails, if there is no
    such script in the working directory, or if the folder holds another step.
    """
    record, known = {"command": [script, *overrides], "commit": commit()}, folder / "step.json"
    if known.exists():
        if json.loads(known.read_text(encoding="utf-8")) != record:
            raise InputError(
                f"study: {folder} was made with other settings or another commit; give another "
                "study.folder, or delete that one"
            )
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


def _answers(path: Path) -> dict[str, list[dict]]:
    """The lines of a run's answers.jsonl by method, in the order of the prompts."""
    found: dict[str, list[dict]] = {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        found.setdefault(line["method"], []).append(line)
    return found


def _measured(metric: str, method: str, seeds: list[dict[str, list[dict]]]) -> dict[str, object]:
    """Speed, tau and quality of a method over all seeds, beside the baseline's."""
    ours, theirs = ([line for own in seeds for line in own[m]] for m in (method, "baseline"))

    def scores(name: str) -> list[list[float]]:
        return [[line[metric] for line in own[name]] for own in seeds]

    def total(lines: list[dict], name: str) -> float:
        return sum(line[name] for line in lines)

    # of each test row the mean over the seeds
    rows = [list(map(fmean, zip(*scores(name), strict=True))) for name in (method, "baseline")]
    low, high = paired_bootstrap(*rows)
    speed, usual = (total(lines, "tokens") / total(lines, "seconds") for lines in (ours, theirs))
    forwards = sum((line["tokens"] - 1) / line["tau"] for line in ours if line["tau"])
    return {
        "speedup": speed / usual,
        "tau": (total(ours, "tokens") - len(ours)) / forwards,
        "identical": total(ours, "identical") / len(ours),
        **{name: fmean(line[name] for line in ours) for name in QUALITY},
        "difference": fmean(rows[0]) - fmean(rows[1]),
        "95 %": f"{low:+.2f} to {high:+.2f} ({metric})",
        "by seed": ", ".join(f"{fmean(own):.2f}" for own in scores(method)),
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
