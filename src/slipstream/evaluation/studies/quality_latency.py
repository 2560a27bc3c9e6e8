"""SPRINTER against exact speculative decoding: what it saves, and what that costs (section 4).

Plain decoding, two-model speculative decoding with drafts of fixed length and with drafts that a
rule ends (SpecDec++, AdaEDL, DISCO), and SPRINTER at several decision thresholds: sampled, on the
same engine, interleaved in one process. Speed, calls and FLOPs of the target, quality against
references and against speculative decoding's answers, and SPRINTER's distance to the target,
measured and as its theorems predict it.
"""

from statistics import fmean

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.draft_length import DraftLength
from slipstream.drafters.draft_model import DraftModel
from slipstream.evaluation.approximation import Approximation, approximation
from slipstream.evaluation.comparison import Run, compare, total_of
from slipstream.evaluation.exactness import PlainReference
from slipstream.evaluation.judging import Judge, fastchat_files, win_rate
from slipstream.evaluation.methods import Method, Plain, Speculative, Sprinter, prepared
from slipstream.evaluation.metrics import paired_bootstrap, rouge
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.evaluation.theory import flops_per_row
from slipstream.targets.target import Target

ALL = "all"


class QualityLatency:
    """draft: writes all drafts; verifier: folder of SPRINTER's; lengths: rules that end drafts, by
    name, None where one is left out (and so are those that do not fit the draft model, with a
    note); num_tokens: of a draft of fixed length; longest: most tokens of a draft that a rule may
    end, and of SPRINTER's runs; ratio, thresholds: SPRINTER's lambda and its decision thresholds;
    judge: says which of two answers is better.
    """

    def __init__(
        self,
        draft: Target,
        verifier: str,
        lengths: dict[str, DraftLength | None],
        num_tokens: int,
        longest: int,
        ratio: float,
        thresholds: list[float],
        judge: Judge,
        sampling: Sampling,
        limits: Limits,
        repeats: int,
        seed: int,
    ):
        if not thresholds or len(set(thresholds)) < len(thresholds):
            raise InputError("study.thresholds: give at least one decision threshold, each once")
        self.exact: dict[str, Method] = {
            "plain": Plain(),
            "speculative": Speculative(DraftModel(draft, num_tokens), 1 + num_tokens),
        }
        self.rules: dict[str, Method] = {
            name: Speculative(DraftModel(draft, longest, length), 1 + longest)
            for name, length in lengths.items()
            if length is not None
        }
        self.sprinters: dict[str, Method] = {
            f"sprinter_{threshold:g}": Sprinter(draft, verifier, ratio, threshold, longest)
            for threshold in thresholds
        }
        self.judge, self.sampling, self.limits = judge, sampling, limits
        self.repeats, self.seed = repeats, seed

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        if self.sampling.greedy:
            raise InputError("study.sampling.temperature: SPRINTER samples; set it above 0")
        sampling = self.sampling
        # What does not fit ends here, not after half an hour.
        for method in (*self.exact.values(), *self.sprinters.values()):
            method.ready(target, sampling, self.limits)
        made = {name: (lambda each=each: each) for name, each in self.rules.items()}
        rules = prepared("study.lengths", made, target, sampling, self.limits, True)
        methods = self.exact | rules | self.sprinters
        prompts = _with_references(target, prompts, self.limits)
        runs = compare(methods, prompts, target, sampling, self.limits, self.repeats, self.seed)
        judged = {run.method: self.judge.scores(target, prompts, run.generations) for run in runs}
        ids = [render_prompt(target.tokenizer, prompt.text) for prompt in prompts]
        found = {
            run.method: [
                approximation(methods[run.method].decoder, prompt, answer)
                for prompt, answer in zip(ids, run.generations, strict=True)
            ]
            for run in runs
            if not run.exact
        }
        flops = flops_per_row(multiplied_weights(target))
        sets = list(dict.fromkeys(prompt.source for prompt in prompts))
        rows, predictions = [], []
        for task in [*sets, ALL] if len(sets) > 1 else sets:
            chosen = [place for place, prompt in enumerate(prompts) if task in (prompt.source, ALL)]
            own = {
                name: sum((each[place] for place in chosen), Approximation())
                for name, each in found.items()
            }
            totals = {run.method: total_of(run, chosen) for run in runs}
            rows += _rows(task, chosen, prompts, runs, totals, judged, own, flops)
            predictions += [
                _predictions(task, name, each, totals[name], totals["speculative"])
                for name, each in own.items()
            ]
        answers = {run.method: run.generations for run in runs}
        return Findings(
            "SPRINTER: quality and latency",
            rows,
            lambda figure: _draw(figure, _last_task(rows), _last_task(predictions)),
            {"SPRINTER: measured and predicted": predictions},
            fastchat_files(prompts, answers),
        )


def multiplied_weights(target: Target) -> int:
    """Weights of the target that a row is multiplied by: all matrices of its layers and LM head."""
    from transformers.pytorch_utils import Conv1D

    count = 0
    for module in target.model.modules():
        if isinstance(module, Conv1D):
            count += module.weight.numel()
        elif hasattr(module, "in_features"):
            count += module.in_features * module.out_features
    return count


def _with_references(target: Target, prompts: list[Prompt], limits: Limits) -> list[Prompt]:
    """Where a prompt has no reference, the target's greedy answer is one."""
    missing = [prompt for prompt in prompts if not prompt.references]
    if missing:
        print(
            f"note: {len(missing)} of {len(prompts)} prompts have no reference; ROUGE-L is against "
            "the target's own greedy answer there"
        )
    reference, known = PlainReference(target, limits), []
    for prompt in prompts:
        references = prompt.references
        if not references:
            answer = reference.generate(render_prompt(target.tokenizer, prompt.text))
            references = (target.tokenizer.decode(answer, skip_special_tokens=True),)
        known.append(Prompt(prompt.text, prompt.source, references))
    return known


def _rows(
    task: str,
    chosen: list[int],
    prompts: list[Prompt],
    runs: list[Run],
    totals: dict[str, Statistics],
    judged: dict[str, list[float]],
    found: dict[str, Approximation],
    flops: int,
) -> list[dict]:
    """A row for each method, over the prompts `chosen`."""
    texts = {run.method: [run.generations[place].text for place in chosen] for run in runs}
    references = [list(prompts[place].references) for place in chosen]
    quality = {name: rouge("rougeL", own, references) for name, own in texts.items()}
    others = [[text] for text in texts["speculative"]]
    scores = {name: [own[place] for place in chosen] for name, own in judged.items()}
    plain, exact = (totals[name].tokens_per_second for name in ("plain", "speculative"))
    rows = []
    for run in runs:
        name, total = run.method, totals[run.method]
        low, high = paired_bootstrap(quality[name], quality["speculative"])
        distance = found[name].distance_of_answers if name in found else 0.0
        rows.append(
            {
                "task": task,
                "method": name,
                "exact": "yes" if run.exact else "no",
                "ms/token": 1000 / total.tokens_per_second,
                "vs plain": total.tokens_per_second / plain,
                "vs SD": total.tokens_per_second / exact,
                "tokens/call": total.tau,
                "target MFLOPs/token": flops * total.target_rows / total.tokens / 1e6,
                "one row a call": flops * total.target_forwards / total.tokens / 1e6,
                "ROUGE-L": fmean(quality[name]),
                "minus SD's, 95 %": f"{low:+.1f}..{high:+.1f}",
                "with SD's": fmean(rouge("rougeL", texts[name], others)),
                "wins vs SD, %": win_rate(scores[name], scores["speculative"]),
                "distance": distance,
            }
        )
    return rows


def _predictions(
    task: str, name: str, found: Approximation, total: Statistics, exact: Statistics
) -> dict:
    """What SPRINTER did on a task, beside what its theorems say.

    exact: of speculative decoding in the same run, whose times of a drafted token and of a call
    the prediction of the time takes.
    """
    run = found.predicted_run_length
    drafted = exact.target_rows - exact.target_forwards
    draft_seconds = exact.shares.get("draft", 0.0) / max(1, drafted)
    call_seconds = exact.shares.get("verify", 0.0) / max(1, exact.target_forwards)
    seconds = total.shares.get("draft", 0.0) + total.shares.get("verify", 0.0)
    stop_seconds = draft_seconds * (run + 1)
    return {
        "task": task,
        "method": name,
        "eta_TP": found.rates.true_positive,
        "eta_FP": found.rates.false_positive,
        "d_TV(p, q)": found.mean_pair_distance,
        "distance": found.mean_distance,
        "Theorem 1": found.predicted_distance,
        "eta_FP by prefix": found.predicted_by_prefix,
        "kept a doubt": found.run_length,
        "Theorem 2": run,
        "memoryless": found.memoryless_run_length,
        "ms/token": 1000 * seconds / max(1, total.tokens - total.answers),
        "Theorem 3": 1000 * (stop_seconds + call_seconds) / (run + 1),
    }


def _threshold(row: dict) -> str:
    return row["method"].rpartition("_")[2]


def _last_task(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["task"] == rows[-1]["task"]]


def _draw(figure, rows: list[dict], predictions: list[dict]) -> None:
    """Quality against latency; distance and tokens per call, measured and predicted."""
    axes = figure.subplots(1, 3, width_ratios=[1.8, 1, 1])
    curve = [row for row in rows if row["exact"] == "no"]
    places = [(row["ms/token"], row["ROUGE-L"]) for row in curve]
    axes[0].plot(*zip(*places, strict=True), "o-", label="sprinter, by threshold")
    for row, place in zip(curve, places, strict=True):
        axes[0].annotate(
            _threshold(row),
            place,
            xytext=(-4, 5),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
    for row in rows:
        if row["exact"] == "yes":
            axes[0].plot(row["ms/token"], row["ROUGE-L"], "s", label=row["method"])
    axes[0].set(xlabel="ms per token", ylabel="ROUGE-L", title="quality and latency")
    axes[0].margins(0.2)
    axes[0].legend(fontsize=8)
    thresholds = [_threshold(row) for row in predictions]
    for part, names, title in (
        (
            axes[1],
            {"distance": "measured", "Theorem 1": "theorem 1", "eta_FP by prefix": "η by prefix"},
            "$d_{TV}$ to the target",
        ),
        (
            axes[2],
            {"kept a doubt": "measured", "Theorem 2": "theorem 2", "memoryless": "memoryless"},
            "kept for each doubt",
        ),
    ):
        for (name, label), style in zip(names.items(), ("o-", "s--", "^:"), strict=True):
            known = [float("nan") if row[name] is None else row[name] for row in predictions]
            part.plot(thresholds, known, style, label=label)
        part.set(xlabel="decision threshold", title=title)
        part.set_ylim(bottom=0)
        part.legend(fontsize=8)
    for part in axes:
        part.spines[["top", "right"]].set_visible(False)
