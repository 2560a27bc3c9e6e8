"""SPRINTER against exact speculative decoding: what it saves, and what that costs (section 4).

Plain decoding, two-model speculative decoding with drafts of fixed length and with drafts that a
rule ends (SpecDec++, AdaEDL, DISCO), SPRINTER at several settings, and controls that ask the target
as often as the chosen one, but without a verifier: sampled, on the same engine, interleaved in one
process. Speed, calls and FLOPs of the target, quality against references and against speculative
decoding's answers, and the distance to the target, measured and as SPRINTER's theorems predict it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Annotated

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from transformers.pytorch_utils import Conv1D

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.core.settings import Count, Len, NotNegative, Seed, Size, Text
from slipstream.decoding.answer import Limits
from slipstream.decoding.plain import PlainDecoder
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.draft_length import DraftLength
from slipstream.drafters.draft_model import DraftModel
from slipstream.evaluation.comparison import Run, compare, task_sets, total_of
from slipstream.evaluation.methods import Method, Plain, Speculative, Sprinter, prepared
from slipstream.evaluation.metrics import bootstrap, each_of, rouge
from slipstream.evaluation.prompts import PromptSets, places_by_set
from slipstream.targets.packed import FusedLinear
from studies import Plot, Prompt, Result, Target
from studies.approximation import Approximation, approximation
from studies.decoding import GREEDY, token_ids
from studies.judging import Judge, fastchat_files, win_rate

PREDICTED = "SPRINTER: measured and predicted"
ROUGE = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}


def sprinter(
    target: Target,
    prompts: list[Prompt],
    draft: Target,
    verifier: Text,
    lengths: dict[str, DraftLength | None],
    num_tokens: Size,
    longest: Size,
    points: Annotated[Sequence[Annotated[Sequence[float], Len(2, 2)]], Len(1)],
    calibration: PromptSets,
    calibration_prompts: Count,
    tolerance: NotNegative,
    judge: Judge,
    sampling: Sampling,
    limits: Limits,
    repeats: Count,
    seed: Seed,
) -> Result:
    """draft: writes all drafts; verifier: folder of SPRINTER's; lengths: rules that end drafts, by
    name, None where one is left out (and so are those that do not fit the draft model, with a
    note); num_tokens: of a draft of fixed length; longest: most tokens of a draft that a rule may
    end, and of SPRINTER's runs; points: lambda and decision threshold of each SPRINTER;
    judge: says which of two answers is better.

    On `calibration_prompts` prompts of `calibration` the fastest point is chosen whose ROUGE-L is
    at most `tolerance` below speculative decoding's, or the one that is nearest to it. Controls
    need about as many calls as it did there, on each prompt set.
    """
    points = [(ratio, threshold) for ratio, threshold in points]
    if len(set(points)) < len(points):
        raise InputError("study.points: give at least one pair of lambda and threshold, each once")
    if sampling.greedy:
        raise InputError("study.sampling.temperature: SPRINTER samples; set it above 0")
    speculative = Speculative(DraftModel(draft, num_tokens), 1 + num_tokens)
    exact: dict[str, Method] = {"plain": Plain(), "speculative": speculative}
    settings = {
        f"sprinter_{ratio:g}_{threshold:g}": (ratio, threshold) for ratio, threshold in points
    }
    sprinters: dict[str, Method] = {
        name: Sprinter(draft, verifier, longest, *each) for name, each in settings.items()
    }
    # What does not fit ends here, not after half an hour.
    for method in (*exact.values(), *sprinters.values()):
        method.ready(target, sampling, limits)
    rules = {
        name: lambda rule=rule: Speculative(DraftModel(draft, longest, rule), 1 + longest)
        for name, rule in lengths.items()
        if rule is not None
    }
    ruled = prepared("study.lengths", rules, target, sampling, limits, True)
    first = calibration.take_for(target, limits, calibration_prompts)
    first = _with_references(target, first, limits)
    tried = {"speculative": speculative} | sprinters
    tries = {r.method: r for r in compare(tried, first, target, sampling, limits, 1, seed)}
    chosen = _chosen(tries, first, tolerance)
    approximate = sprinters | _controls(draft, tries[chosen], first, longest, limits)
    methods = exact | ruled | approximate
    prompts = _with_references(target, prompts, limits)
    runs = {r.method: r for r in compare(methods, prompts, target, sampling, limits, repeats, seed)}
    ids, references = token_ids(target, prompts), [list(prompt.references) for prompt in prompts]
    texts = {name: [answer.text for answer in run.generations] for name, run in runs.items()}
    others = [[text] for text in texts["speculative"]]
    scores = {  # of every answer
        name: pd.DataFrame(
            {
                shown: each_of(partial(rouge, kind), texts[name], references)
                for shown, kind in ROUGE.items()
            }
            | {"with SD's": each_of(partial(rouge, "rougeL"), texts[name], others)}
            | {"judged": judge.scores(target, prompts, run.generations)}
        )
        for name, run in runs.items()
    }
    found: dict[str, list[Approximation]] = {name: [] for name in approximate}
    for name, method in approximate.items():
        for prompt, own, answer in zip(prompts, ids, runs[name].generations, strict=True):
            method.expect(prompt.source)
            found[name].append(approximation(method.decoder, own, answer))
    flops = 2 * multiplied_weights(target)
    rows, predictions = [], []
    for task, places in task_sets(prompts).items():
        totals = {name: total_of(run, places) for name, run in runs.items()}
        own = {name: known.iloc[places] for name, known in scores.items()}
        sums = {
            name: sum((each[n] for n in places), Approximation()) for name, each in found.items()
        }
        means, against = {name: each.mean() for name, each in own.items()}, own["speculative"]
        rows += [
            {"task": task, "method": name}
            | {"how": "chosen" if name == chosen else runs[name].details.get(task, "")}
            | {"exact": "yes" if runs[name].exact else "no"}
            | _costs(total, totals, flops)
            | means[name][[*ROUGE]].to_dict()
            | {"minus SD's, 95 %": _apart(own[name], against)}
            | {"minus random's, 95 %": _apart(own[name], own["control_random"])}
            | {"with SD's": means[name]["with SD's"]}
            | {"wins vs SD, %": win_rate([*own[name]["judged"]], [*against["judged"]])}
            | {"distance": sums[name].distance_of_answers if name in sums else 0.0}
            for name, total in totals.items()
        ]
        predictions += [
            {"task": task, "method": name, "lambda": ratio, "threshold": threshold}
            | _predictions(sums[name], totals[name], totals["speculative"])
            for name, (ratio, threshold) in settings.items()
        ]
    panels = (
        ("distance", "Theorem 1", "eta_FP by prefix"),
        ("kept a doubt", "Theorem 2", "memoryless"),
    )
    plots = (
        Plot("ms/token", ("ROUGE-L",), hue="method", panel="task", kind="point"),
        Plot("threshold", panels, hue="lambda", panel="task", table=PREDICTED),
    )
    files = fastchat_files(prompts, {name: run.generations for name, run in runs.items()})
    more = {PREDICTED: predictions}
    return Result("SPRINTER: quality and latency", rows, plots, more, files=files)


def _chosen(tries: dict[str, Run], prompts: list[Prompt], tolerance: float) -> str:
    """The fastest way whose ROUGE-L is near enough, else the one of the best."""
    references, rouge_l = [prompt.references for prompt in prompts], partial(rouge, "rougeL")
    quality = {
        name: fmean(each_of(rouge_l, [answer.text for answer in run.generations], references))
        for name, run in tries.items()
    }
    least = quality.pop("speculative") - tolerance
    near = [name for name, found in quality.items() if found >= least]
    if not near:
        return max(quality, key=quality.get)
    everything = range(len(prompts))
    return max(near, key=lambda name: total_of(tries[name], everything).tokens_per_second)


def _controls(
    draft: Target, run: Run, prompts: list[Prompt], longest: int, limits: Limits
) -> dict[str, Method]:
    """The draft model alone (after the first token), a cap alone, and doubts at random."""
    alone, capped, random = {}, {}, {}
    for task, places in places_by_set(prompts).items():
        lengths = [len(run.generations[place].ids) for place in places]
        calls = total_of(run, places).target_forwards
        alone[task] = 1.0, limits.max_new_tokens
        capped[task] = 1.0, matched_cap(lengths, calls)
        random[task] = matched_keep(lengths, calls, longest), longest
    settings = {"control_draft": alone, "control_cap": capped, "control_random": random}
    return {name: Control(draft, of_set) for name, of_set in settings.items()}


def _apart(own: pd.DataFrame, other: pd.DataFrame) -> str:
    """The 95 % interval of how far ROUGE-L is above the other's."""
    low, high = bootstrap(np.mean, own["ROUGE-L"].to_numpy() - other["ROUGE-L"].to_numpy())
    return f"{low:+.1f}..{high:+.1f}"


def multiplied_weights(target: Target) -> int:
    """Weights of the target that a row is multiplied by: all matrices of its layers and LM head,
    those that a GPU has side by side once."""
    modules = [m for m in target.model.modules() if not isinstance(m, FusedLinear)]
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
    decoder = PlainDecoder(target, GREEDY, limits)
    return [
        prompt if prompt.references else replace(prompt, references=(decoder.generate(ids).text,))
        for prompt, ids in zip(prompts, token_ids(target, prompts), strict=True)
    ]


def _costs(total: Statistics, totals: dict[str, Statistics], flops: int) -> dict[str, float]:
    """Speed, calls and FLOPs of a method; flops: of one row of the target."""
    plain, exact = (totals[name].tokens_per_second for name in ("plain", "speculative"))
    return {
        "ms/token": 1000 / total.tokens_per_second,
        "vs plain": total.tokens_per_second / plain,
        "vs SD": total.tokens_per_second / exact,
        "tokens/call": total.tau if total.target_forwards else None,
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


class Control(Sprinter):
    """SPRINTER without a verifier: it asks the target as often, but nobody says when. settings: by
    prompt set the probability with which a token is kept, whatever it is, and the cap."""

    def __init__(self, draft: Target, settings: dict[str, tuple[float, int]]):
        super().__init__(draft, 1.0, max(cap for _, cap in settings.values()))
        self.of_set = settings

    def expect(self, prompt_set: str) -> None:
        if prompt_set not in self.of_set:
            raise InputError(f"study.calibration_prompts: none is of {prompt_set}; give more")
        self.decoder.kept, self.decoder.cap = self.of_set[prompt_set]
        self.details = f"keeps {self.decoder.kept:.1%}, runs of up to {self.decoder.cap}"


def calls_by_chance(lengths: Sequence[int], keep: float, cap: int) -> float:
    """The expected number of calls for answers of `lengths` tokens, where each token is kept with
    probability `keep`, in runs of up to `cap`. The first token comes with the prefill; a call
    writes the one after a run.

    >>> calls_by_chance([7, 4], 1.0, 2), calls_by_chance([7, 4], 0.0, 2)
    (3.0, 9.0)
    """
    kept = np.zeros(cap + 1)  # probabilities of so many tokens since the last call
    kept[0] = 1.0
    calls = [0.0]
    for _ in range(max(lengths) - 1):
        kept = np.append(0.0, kept[:-1] * keep)
        kept[0] = 1.0 - kept.sum()
        calls.append(calls[-1] + kept[0])
    return float(sum(calls[length - 1] for length in lengths))


def matched_cap(lengths: Sequence[int], calls: int) -> int:
    """The cap with which answers of `lengths` need a number of calls as near as can be."""
    caps = range(1, max(lengths) + 1)
    return min(caps, key=lambda cap: abs(calls_by_chance(lengths, 1.0, cap) - calls))


def matched_keep(lengths: Sequence[int], calls: int, cap: int) -> float:
    """The probability with which the expected number is `calls`, 1 where the cap needs more.

    >>> round(calls_by_chance([7, 4], matched_keep([7, 4], 5, 3), 3), 6)
    5.0
    """
    if calls_by_chance(lengths, 1.0, cap) >= calls:
        return 1.0
    return float(brentq(lambda keep: calls_by_chance(lengths, keep, cap) - calls, 0.0, 1.0))
