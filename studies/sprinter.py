"""SPRINTER against exact speculative decoding: what it saves, and what that costs (section 4).

Plain decoding, two-model speculative decoding with drafts of fixed length and with drafts that a
rule ends (SpecDec++, AdaEDL, DISCO), and SPRINTER at several decision thresholds: sampled, on the
same engine, interleaved in one process. Speed, calls and FLOPs of the target, quality against
references and against speculative decoding's answers, and SPRINTER's distance to the target,
measured and as its theorems predict it.
"""

from dataclasses import replace
from functools import partial
from statistics import fmean

from transformers.pytorch_utils import Conv1D

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.draft_length import DraftLength
from slipstream.drafters.draft_model import DraftModel
from slipstream.evaluation.comparison import compare, total_of
from slipstream.evaluation.exactness import PlainReference
from slipstream.evaluation.methods import Method, Plain, Speculative, Sprinter, prepared
from slipstream.evaluation.metrics import paired_bootstrap, rouge
from studies import Plot, Prompt, Result, Target
from studies.approximation import Approximation, approximation
from studies.decoding import task_sets, token_ids
from studies.judging import Judge, fastchat_files, win_rate

PREDICTED = "SPRINTER: measured and predicted"


def sprinter(
    target: Target,
    prompts: list[Prompt],
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
) -> Result:
    """draft: writes all drafts; verifier: folder of SPRINTER's; lengths: rules that end drafts, by
    name, None where one is left out (and so are those that do not fit the draft model, with a
    note); num_tokens: of a draft of fixed length; longest: most tokens of a draft that a rule may
    end, and of SPRINTER's runs; ratio, thresholds: SPRINTER's lambda and its decision thresholds;
    judge: says which of two answers is better.
    """
    if not thresholds or len(set(thresholds)) < len(thresholds):
        raise InputError("study.thresholds: give at least one decision threshold, each once")
    if sampling.greedy:
        raise InputError("study.sampling.temperature: SPRINTER samples; set it above 0")
    speculative = Speculative(DraftModel(draft, num_tokens), 1 + num_tokens)
    exact: dict[str, Method] = {"plain": Plain(), "speculative": speculative}
    sprinters: dict[str, Method] = {
        f"sprinter_{each:g}": Sprinter(draft, verifier, ratio, each, longest) for each in thresholds
    }
    # What does not fit ends here, not after half an hour.
    for method in (*exact.values(), *sprinters.values()):
        method.ready(target, sampling, limits)
    rules = {
        name: lambda rule=rule: Speculative(DraftModel(draft, longest, rule), 1 + longest)
        for name, rule in lengths.items()
        if rule is not None
    }
    methods = exact | prepared("study.lengths", rules, target, sampling, limits, True) | sprinters
    prompts = _with_references(target, prompts, limits)
    runs = {r.method: r for r in compare(methods, prompts, target, sampling, limits, repeats, seed)}
    ids, references = token_ids(target, prompts), [list(prompt.references) for prompt in prompts]
    texts = {name: [answer.text for answer in run.generations] for name, run in runs.items()}
    others = [[text] for text in texts["speculative"]]
    scores = {  # of every answer
        name: {
            "ROUGE-L": rouge("rougeL", texts[name], references),
            "with SD's": rouge("rougeL", texts[name], others),
            "judged": judge.scores(target, prompts, run.generations),
        }
        for name, run in runs.items()
    }
    found = {
        name: list(map(partial(approximation, method.decoder), ids, runs[name].generations))
        for name, method in sprinters.items()
    }
    flops = 2 * multiplied_weights(target)
    rows, predictions = [], []
    for task, chosen in task_sets(prompts).items():
        totals = {name: total_of(run, chosen) for name, run in runs.items()}
        own = {
            name: {what: [each[n] for n in chosen] for what, each in known.items()}
            for name, known in scores.items()
        }
        sums = {
            name: sum((each[n] for n in chosen), Approximation()) for name, each in found.items()
        }
        for name, total in totals.items():
            low, high = paired_bootstrap(own[name]["ROUGE-L"], own["speculative"]["ROUGE-L"])
            rows.append(
                {
                    "task": task,
                    "method": name,
                    "exact": "yes" if runs[name].exact else "no",
                    **_costs(total, totals, flops),
                    "ROUGE-L": fmean(own[name]["ROUGE-L"]),
                    "minus SD's, 95 %": f"{low:+.1f}..{high:+.1f}",
                    "with SD's": fmean(own[name]["with SD's"]),
                    "wins vs SD, %": win_rate(own[name]["judged"], own["speculative"]["judged"]),
                    "distance": sums[name].distance_of_answers if name in sums else 0.0,
                }
            )
        predictions += [
            {"task": task, "method": name, "threshold": float(name.rpartition("_")[2])}
            | _predictions(each, totals[name], totals["speculative"])
            for name, each in sums.items()
        ]
    panels = (
        ("distance", "Theorem 1", "eta_FP by prefix"),
        ("kept a doubt", "Theorem 2", "memoryless"),
    )
    plots = (
        Plot("ms/token", ("ROUGE-L",), hue="method", panel="task", kind="point"),
        Plot("threshold", panels, panel="task", table=PREDICTED),
    )
    files = fastchat_files(prompts, {name: run.generations for name, run in runs.items()})
    more = {PREDICTED: predictions}
    return Result("SPRINTER: quality and latency", rows, plots, more, files=files)


def multiplied_weights(target: Target) -> int:
    """Weights of the target that a row is multiplied by: all matrices of its layers and LM head."""
    modules = list(target.model.modules())
    return sum(m.weight.numel() for m in modules if isinstance(m, Conv1D)) + sum(
        m.in_features * m.out_features for m in modules if hasattr(m, "in_features")
    )


def _with_references(target: Target, prompts: list[Prompt], limits: Limits) -> list[Prompt]:
    """Where a prompt has no reference, the target's greedy answer is one."""
    if missing := sum(not prompt.references for prompt in prompts):
        print(
            f"note: {missing} of {len(prompts)} prompts have no reference; ROUGE-L is against "
            "the target's own greedy answer there"
        )
    reference = PlainReference(target, limits)

    def known(prompt: Prompt) -> Prompt:
        if prompt.references:
            return prompt
        answer = reference.generate(render_prompt(target.tokenizer, prompt.text))
        text = target.tokenizer.decode(answer, skip_special_tokens=True)
        return replace(prompt, references=(text,))

    return list(map(known, prompts))


def _costs(total: Statistics, totals: dict[str, Statistics], flops: int) -> dict[str, float]:
    """Of a method; flops: of one row of the target."""
    plain, exact = (totals[name].tokens_per_second for name in ("plain", "speculative"))
    return {
        "ms/token": 1000 / total.tokens_per_second,
        "vs plain": total.tokens_per_second / plain,
        "vs SD": total.tokens_per_second / exact,
        "tokens/call": total.tau,
        "target MFLOPs/token": flops * total.target_rows / total.tokens / 1e6,
        "one row a call": flops * total.target_forwards / total.tokens / 1e6,
    }


def _predictions(found: Approximation, total: Statistics, exact: Statistics) -> dict:
    """What SPRINTER did on a task, beside what its theorems say.

    exact: of speculative decoding in the same run, whose times of a drafted token and of a call
    the prediction of the time takes.
    """
    columns, drafted = found.columns(), exact.target_rows - exact.target_forwards
    draft_seconds = exact.shares.get("draft", 0.0) / max(1, drafted)
    call_seconds = exact.shares.get("verify", 0.0) / max(1, exact.target_forwards)
    seconds = total.shares.get("draft", 0.0) + total.shares.get("verify", 0.0)
    return columns | {
        "ms/token": 1000 * seconds / max(1, total.tokens - total.answers),
        "Theorem 3": 1000 * (draft_seconds + call_seconds / (columns["Theorem 2"] + 1)),
    }
