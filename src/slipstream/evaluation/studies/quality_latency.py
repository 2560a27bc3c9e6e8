"""SPRINTER against exact speculative decoding: what it saves, and what that costs (section 4).

Plain decoding, two-model speculative decoding with drafts of fixed length, stopped by SpecDec++'s
head or by AdaEDL's entropy bound, and SPRINTER at several decision thresholds: sampled, on the same
engine, interleaved in one process. Speed, calls and FLOPs of the target, quality against references
and against speculative decoding's answers, and SPRINTER's distance to the target, measured and as
its theorems predict it.
"""

from statistics import fmean

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.draft_length import AnyRejected, EntropyBound
from slipstream.drafters.draft_model import DraftModel
from slipstream.evaluation.approximation import Approximation, approximation
from slipstream.evaluation.comparison import Run, compare
from slipstream.evaluation.exactness import PlainReference
from slipstream.evaluation.judging import Judge, fastchat_files, win_rate
from slipstream.evaluation.methods import Method, Plain, Speculative, Sprinter
from slipstream.evaluation.metrics import paired_bootstrap, rouge
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.evaluation.theory import flops_per_row
from slipstream.targets.target import Target

ALL = "all"


class QualityLatency:
    """draft: writes all drafts; verifier: folder of SPRINTER's; head, head_threshold:
    folder of SpecDec++'s acceptance head, and the probability of a rejection that it stops at;
    entropy: AdaEDL's rule; num_tokens: of a draft of fixed length; longest: most tokens of a draft
    that a rule may end, and of SPRINTER's runs; ratio, thresholds: SPRINTER's lambda and its
    decision thresholds; judge: says which of two answers is better.
    """

    def __init__(
        self,
        draft: Target,
        verifier: str,
        head: str,
        head_threshold: float,
        entropy: EntropyBound,
        num_tokens: int,
        longest: int,
        ratio: float,
        thresholds: list[float],
        judge: Judge,
        sampling: Sampling,
        limits: Limits,
        repeats: int,
    ):
        if not thresholds:
            raise InputError("study.thresholds: give at least one decision threshold")
        stopped = {
            "specdec++": AnyRejected(head, head_threshold),
            "adaedl": entropy,
        }
        self.methods: dict[str, Method] = {"plain": Plain()}
        self.methods["speculative"] = Speculative(DraftModel(draft, num_tokens), 1 + num_tokens)
        for name, length in stopped.items():
            drafter = DraftModel(draft, longest, length)
            self.methods[name] = Speculative(drafter, 1 + longest)
        for threshold in thresholds:
            method = Sprinter(draft, verifier, ratio, threshold, longest)
            self.methods[f"sprinter {threshold:g}"] = method
        self.judge, self.sampling, self.limits = judge, sampling, limits
        self.repeats = repeats

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        if self.sampling.greedy:
            raise InputError("study.sampling.temperature: SPRINTER samples; set it above 0")
        prompts = _with_references(target, prompts, self.limits)
        methods, sampling = self.methods, self.sampling
        runs = compare(methods, prompts, target, sampling, self.limits, self.repeats, 0)
        judged = {run.method: self.judge.scores(target, prompts, run.generations) for run in runs}
        ids = [render_prompt(target.tokenizer, prompt.text) for prompt in prompts]
        found = {
            run.method: [
                approximation(methods[run.method].decoder, [prompt], [answer.ids])
                for prompt, answer in zip(ids, run.generations, strict=True)
            ]
            for run in runs
            if not run.exact
        }
        flops = flops_per_row(multiplied_weights(target))
        sets = list(dict.fromkeys(prompt.source for prompt in prompts))
        rows = []
        for name in [*sets, ALL] if len(sets) > 1 else sets:
            chosen = [place for place, prompt in enumerate(prompts) if name in (prompt.source, ALL)]
            rows += _rows(name, chosen, prompts, runs, judged, found, flops)
        answers = {run.method.replace(" ", "_"): run.generations for run in runs}
        return Findings(
            "SPRINTER: quality and latency",
            rows,
            lambda figure: _draw(figure, [row for row in rows if row["task"] == rows[-1]["task"]]),
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
    judged: dict[str, list[float]],
    found: dict[str, list[Approximation]],
    flops: int,
) -> list[dict]:
    """A row for each method, over the prompts `chosen`."""
    answers = {run.method: [run.generations[place] for place in chosen] for run in runs}
    totals = {
        name: sum((answer.statistics for answer in own), Statistics())
        for name, own in answers.items()
    }
    texts = {name: [answer.text for answer in own] for name, own in answers.items()}
    references = [list(prompts[place].references) for place in chosen]
    quality = {name: rouge("rougeL", own, references) for name, own in texts.items()}
    others = [[text] for text in texts["speculative"]]
    scores = {name: [own[place] for place in chosen] for name, own in judged.items()}
    plain, exact = (totals[name].tokens_per_second for name in ("plain", "speculative"))
    rows = []
    for run in runs:
        name, total = run.method, totals[run.method]
        low, high = paired_bootstrap(quality[name], quality["speculative"])
        row = {
            "task": task,
            "method": name,
            "exact": "yes" if run.exact else "no",
            "ms/token": 1000 / total.tokens_per_second,
            "vs plain": total.tokens_per_second / plain,
            "vs SD": total.tokens_per_second / exact,
            "tokens/call": total.tau,
            "MFLOPs/token": flops * total.target_rows / total.tokens / 1e6,
            "one row/call": flops * total.target_forwards / total.tokens / 1e6,
            "ROUGE-L": fmean(quality[name]),
            "minus SD's, 95 %": f"{low:+.1f} .. {high:+.1f}",
            "with SD's answers": fmean(rouge("rougeL", texts[name], others)),
            "wins vs SD, %": win_rate(scores[name], scores["speculative"]),
        }
        own = (
            sum((found[name][place] for place in chosen), Approximation())
            if name in found
            else None
        )
        rows.append(row | _theory(own, total))
    return rows


def _theory(found: Approximation | None, total: Statistics) -> dict:
    """SPRINTER's measured distance, run length and time, beside what its theorems say."""
    names = "distance", "Theorem 1", "run", "Theorem 2", "Theorem 3, ms/token", "eta_TP", "eta_FP"
    if found is None:
        return dict.fromkeys(names) | {"distance": 0.0}
    # Every call of the target ends a run and adds one token to those that the verifier kept.
    run, calls = total.tau - 1, max(1, total.target_forwards)
    draft_seconds = total.shares["draft"] / (total.tokens - total.answers)
    call_seconds = total.shares["verify"] / calls
    predicted = (draft_seconds * (found.predicted_run + 1) + call_seconds) / (
        found.predicted_run + 1
    )
    values = (
        found.mean_distance,
        found.predicted_distance,
        run,
        found.predicted_run,
        1000 * predicted,
        found.rates.true_positive,
        found.rates.false_positive,
    )
    return dict(zip(names, values, strict=True))


def _draw(figure, rows: list[dict]) -> None:
    """Quality against latency; distance against its prediction; tokens per call."""
    axes = figure.subplots(1, 3)
    curve = [row for row in rows if row["exact"] == "no"]
    times = [row["ms/token"] for row in curve]
    axes[0].plot(times, [row["ROUGE-L"] for row in curve], "o-", label="SPRINTER, by threshold")
    for row in curve:
        place = row["ms/token"], row["ROUGE-L"]
        axes[0].annotate(f" {row['method'].split()[-1]}", place, fontsize=8)
    for row in rows:
        if row["exact"] == "yes":
            axes[0].plot(row["ms/token"], row["ROUGE-L"], "s", label=row["method"])
    axes[0].set(xlabel="ms per token", ylabel="ROUGE-L", title="quality and latency")
    thresholds = [row["method"].split()[-1] for row in curve]
    for part, names, title in (
        (axes[1], ("distance", "Theorem 1"), "distance to the target, $d_{TV}$"),
        (axes[2], ("run", "Theorem 2"), "tokens kept before a call"),
    ):
        for name, label, style in zip(names, ("measured", "predicted"), ("o-", "s--"), strict=True):
            part.plot(thresholds, [row[name] for row in curve], style, label=label)
        part.set(xlabel="decision threshold", title=title)
        part.set_ylim(bottom=0)
    for part in axes:
        part.spines[["top", "right"]].set_visible(False)
        part.legend(fontsize=8)
