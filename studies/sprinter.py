"""SPRINTER against exact speculative decoding: what it saves, and what that costs (section 4).

Plain decoding, two-model speculative decoding with drafts of fixed length and with drafts that a
rule ends (SpecDec++, AdaEDL, DISCO), SPRINTER at several settings, and controls without a verifier,
for each setting one that asks the target as often: sampled, on the same engine, interleaved in one
process. Speed, calls and FLOPs of the target, quality against references and against speculative
decoding's answers, and the distance to the target, measured and as SPRINTER's theorems predict it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Annotated

import numpy as np
import pandas as pd
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
from slipstream.evaluation.metrics import bootstrap, ratio_interval, rouge
from slipstream.evaluation.prompts import PromptSets
from slipstream.targets.packed import FusedLinear
from studies import Plot, Prompt, Result, Target
from studies.approximation import Approximation, approximation
from studies.decoding import GREEDY, speed_ratio, token_ids
from studies.judging import Judge, fastchat_files, wins_of
from studies.sprinter_controls import at_random, controls_of

PREDICTED = "SPRINTER: measured and predicted"
ROUGE = {f"ROUGE-{kind}": partial(rouge, f"rouge{kind}") for kind in "12L"}
ROUGE_L = ROUGE["ROUGE-L"]


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
    at most `tolerance` below speculative decoding's, or the one that is nearest to it. Controls are
    to need as many calls there, on each prompt set: a cap alone as the chosen point, doubts at
    random as each point, one control for each.
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
    points_tried = {name: tries[name] for name in settings}
    controls = controls_of(draft, points_tried, chosen, first, longest, limits)
    approximate = sprinters | controls
    methods = exact | ruled | approximate
    prompts = _with_references(target, prompts, limits)
    runs = {r.method: r for r in compare(methods, prompts, target, sampling, limits, repeats, seed)}
    every = {}
    for name, run in runs.items():
        judged = judge.scores(target, prompts, run.generations)
        scores = _scores(run, runs["speculative"], prompts, judged)
        apart = _apart(target, run, prompts, approximate.get(name))
        every[name] = Measured([answer.statistics for answer in run.generations], scores, apart)
    flops = 2 * multiplied_weights(target)
    rows, predictions = [], []
    for task, places in task_sets(prompts).items():
        part = {name: measured.of(places) for name, measured in every.items()}
        speculative, plain = part["speculative"], part["plain"]
        for name, own in part.items():
            random = part[at_random(name if name in settings else chosen)]
            rows.append(
                {"task": task, "method": name}
                | {"how": "chosen" if name == chosen else runs[name].details.get(task, "")}
                | {"exact": "yes" if runs[name].exact else "no"}
                | _costs(own, plain, speculative, flops)
                | _quality(own, speculative, random)
                | _distance(own, random)
            )
        predictions += [
            {"task": task, "method": name, "lambda": ratio, "threshold": threshold}
            | _predictions(part[name], speculative.total)
            for name, (ratio, threshold) in settings.items()
        ]
    panels = (
        ("distance", "Theorem 1", "eta_FP by prefix"),
        ("kept a doubt", "Theorem 2", "memoryless"),
    )
    plots = (
        Plot("ms/token", ("ROUGE-L", "distance"), hue="method", panel="task", kind="point"),
        Plot("threshold", panels, hue="lambda", panel="task", table=PREDICTED),
    )
    files = fastchat_files(prompts, {name: run.generations for name, run in runs.items()})
    more = {PREDICTED: predictions}
    return Result("SPRINTER: quality and latency", rows, plots, more, files=files)


def _chosen(tries: dict[str, Run], prompts: list[Prompt], tolerance: float) -> str:
    """The fastest way whose ROUGE-L is near enough, else the one of the best."""
    references = [prompt.references for prompt in prompts]
    quality = {
        name: fmean(map(ROUGE_L, [answer.text for answer in run.generations], references))
        for name, run in tries.items()
    }
    least = quality.pop("speculative") - tolerance
    near = [name for name, found in quality.items() if found >= least]
    if not near:
        return max(quality, key=quality.get)
    everything = range(len(prompts))
    return max(near, key=lambda name: total_of(tries[name], everything).tokens_per_second)


def _scores(run: Run, exact: Run, prompts: list[Prompt], judged: list[float]) -> pd.DataFrame:
    """Of every answer ROUGE, the likeness to speculative decoding's, and the judge's."""
    texts = [answer.text for answer in run.generations]
    references = [list(prompt.references) for prompt in prompts]
    found = {kind: list(map(score, texts, references)) for kind, score in ROUGE.items()}
    like = list(map(ROUGE_L, texts, [[answer.text] for answer in exact.generations]))
    return pd.DataFrame(found | {"with SD's": like, "judged": judged})


def _apart(
    target: Target, run: Run, prompts: list[Prompt], method: Sprinter | None
) -> list[Approximation]:
    """How far each answer is from the target; method: None for exact ones."""
    if method is None:
        return [Approximation(len(answer.ids)) for answer in run.generations]
    found, ids = [], token_ids(target, prompts)
    for prompt, own, answer in zip(prompts, ids, run.generations, strict=True):
        method.expect(prompt.source)
        found.append(approximation(method.decoder, own, answer))
    return found


@dataclass(frozen=True)
class Measured:
    """What a method did with some prompts, one by one; scores: of ROUGE, of likeness to speculative
    decoding's answers, and of the judge."""

    statistics: list[Statistics]
    scores: pd.DataFrame
    apart: list[Approximation]

    def of(self, places: list[int]) -> "Measured":
        statistics, apart = ([own[n] for n in places] for own in (self.statistics, self.apart))
        return Measured(statistics, self.scores.iloc[places], apart)

    @property
    def total(self) -> Statistics:
        return sum(self.statistics, Statistics())

    @property
    def approximation(self) -> Approximation:
        return sum(self.apart, Approximation())


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


def _costs(own: Measured, plain: Measured, exact: Measured, flops: int) -> dict[str, object]:
    """Speed, calls and FLOPs of a method beside plain and exact speculative decoding; flops: of one
    row of the target."""
    total = own.total
    ratio, *ends = speed_ratio(own.statistics, exact.statistics, True)
    return {
        "ms/token": 1000 / total.tokens_per_second,
        "vs plain": total.tokens_per_second / plain.total.tokens_per_second,
        "vs SD": ratio,
        "vs SD, 95 %": _ends(ends, ".2f"),
        "tokens/call": total.tau if total.target_forwards else None,
        "target MFLOPs/token": flops * total.target_rows / total.tokens / 1e6,
        "one row a call": flops * total.target_forwards / total.tokens / 1e6,
    }


def _quality(own: Measured, exact: Measured, random: Measured) -> dict[str, object]:
    """ROUGE and the judge's word, beside speculative decoding and doubts at random."""
    means, rouge_l = own.scores.mean(), own.scores["ROUGE-L"].to_numpy()
    less = [rouge_l - other.scores["ROUGE-L"].to_numpy() for other in (exact, random)]
    wins = wins_of(own.scores["judged"], exact.scores["judged"])
    return means[[*ROUGE]].to_dict() | {
        "minus SD's, 95 %": _ends(bootstrap(np.mean, less[0]), "+.1f"),
        "minus random's, 95 %": _ends(bootstrap(np.mean, less[1]), "+.1f"),
        "with SD's": means["with SD's"],
        "wins vs SD, %": float(wins.mean()),
        "wins, 95 %": _ends(bootstrap(np.mean, wins), ".0f"),
    }


def _distance(own: Measured, random: Measured) -> dict[str, object]:
    """The distance of what was emitted to the target's distribution, a mean over tokens, and how
    much of that of doubts at random it is."""
    sides = [([a.distance for a in m.apart], [a.tokens for a in m.apart]) for m in (own, random)]
    more_than_rounding = random.approximation.distance_of_answers > 1e-6
    ends = ratio_interval(*sides)[1:] if more_than_rounding else None
    return {
        "distance": own.approximation.distance_of_answers,
        "of random's, 95 %": ends and _ends(ends, ".2f"),
    }


def _ends(interval: Sequence[float], digits: str) -> str:
    low, high = interval
    return f"{low:{digits}}..{high:{digits}}"


def _predictions(own: Measured, exact: Statistics) -> dict:
    """What SPRINTER did on a task, beside what its theorems say.

    exact: of speculative decoding in the same run, whose times of a drafted token and of a call
    the prediction of the time takes.
    """
    columns, total = own.approximation.columns(), own.total
    # an answer's first drafted token belongs to the prefill
    drafted = exact.target_rows - exact.target_forwards - exact.answers
    draft_seconds = exact.shares.get("draft", 0.0) / max(1, drafted)
    call_seconds = exact.shares.get("verify", 0.0) / max(1, exact.target_forwards)
    seconds = total.shares.get("draft", 0.0) + total.shares.get("verify", 0.0)
    return columns | {
        "ms/token": 1000 * seconds / max(1, total.tokens - total.answers),
        "Theorem 3": 1000 * (draft_seconds + call_seconds / (columns["Theorem 2"] + 1)),
    }
