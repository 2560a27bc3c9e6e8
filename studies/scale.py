"""Ever larger targets of the same function: what each way to decode gains where a forward is bound
by its weights. Sizes are written once, as folders (`studies.enlargement`)."""

import gc
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from slipstream.core.files import write_json
from slipstream.core.sampling import Sampling
from slipstream.core.settings import Below1, Budget, Count, NotNegative, Size, Text
from slipstream.decoding.calibrated import calibration_path
from slipstream.decoding.calibration import calibrate
from slipstream.drafters.auto import Auto
from slipstream.drafters.base import Drafter
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.comparison import Run, compare, total_of
from slipstream.evaluation.exactness import Divergence, PlainReference, first_divergence
from slipstream.evaluation.methods import Method, Plain, Speculative, Transformers
from slipstream.evaluation.prompts import PromptSets, places_by_set
from slipstream.targets.compiled import compile_target
from slipstream.targets.loading import load_target
from slipstream.targets.quantized import weight_bytes
from studies import Plot, Prompt, Result, Rows, Target
from studies.decoding import LIMITS, speed_ratio, token_ids
from studies.enlargement import write

# Chains of the draft model and of prompt lookup may be so long; the calibrated budget cuts them.
LONGEST = 32
CALL, AFTER = "vs generate, whole calls", "vs plain, after the prefill"


def scale(
    target: Target,
    prompts: list[Prompt],
    sizes: Sequence[Text],
    untrained: dict[str, Drafter],
    top_k: Size,
    prune_threshold: Below1,
    temperatures: Sequence[NotNegative],
    budgets: Sequence[Budget],
    calibration: PromptSets,
    calibration_prompts: Count,
    repeats: Count,
    folder: Text,
    dtype: Text,
) -> Result:
    """At each of `sizes` (of `studies.enlargement.SHAPES`, or 'small' for the shipped models):
    transformers' `generate` and assisted generation, plain decoding, streams of both schedules and
    pruned, the draft model, the drafters `untrained`, and at every step the choice among streams
    and those of these whose trees can be parts of larger ones.

    `calibration_prompts` prompts of `calibration` choose the number of nodes of every drafter at
    each size and temperature; the choice may take as many as any. folder: where models, which are
    made once, and calibrations go.
    """
    chosen_on = calibration.take_for(target, LIMITS, calibration_prompts)
    calibrations = str(Path(folder) / "calibrations")
    rows: Rows = []
    for size in sizes:
        place = "slipstream/small-"
        if size != "small":
            place = f"{write(Path(folder) / size, size, dtype, device=target.device.type)}/"
        paths = [place + part for part in ("target", "draft", "streaming")]
        large = load_target(paths[0], dtype, target.device.type)
        compile_target(large, "off" if target.compiled is None else "auto")
        draft = load_target(paths[1], dtype, target.device.type)
        drafters: dict[str, Drafter] = {
            "streams, deferred": Streaming(paths[2], "deferred", top_k),
            "streams, fused": Streaming(paths[2], "fused", top_k),
            "streams, fused, pruned": Streaming(paths[2], "fused", top_k, prune_threshold),
            "draft model": DraftModel(draft, LONGEST),
        } | untrained
        parts = {name: own for name, own in untrained.items() if own.attach(large).mergeable}
        choice = Auto({"streams": drafters["streams, deferred"]} | parts)
        for temperature in temperatures:
            sampling, widest = Sampling(temperature), max(budgets)
            methods: dict[str, Method] = {
                "transformers": Transformers(),
                "transformers, assisted": Transformers(paths[1]),
                "plain": Plain(),
            }
            for name, drafter in drafters.items():
                given = drafter.variants(drafter.attach(large)), token_ids(large, chosen_on)
                found = calibrate(large, *given, sampling, LIMITS, budgets, 1)
                del given  # which holds the target
                write_json(calibration_path(calibrations, large, drafter, sampling), asdict(found))
                widest = max(widest, found.budget)
                methods[name] = Speculative(drafter, "auto", calibrations=calibrations)
            methods["auto"] = Speculative(choice, widest)
            runs = compare(methods, prompts, large, sampling, LIMITS, repeats, seed=0)
            millions = weight_bytes(large.model) / large.dtype.itemsize / 1e6
            shared = {"size": size, "parameters, M": millions, "temperature": temperature}
            rows += [shared | row for row in _rows(runs, prompts, large, sampling)]
        large = draft = drafters = methods = runs = None  # before the next ones are loaded
        gc.collect()
    for row in rows:
        row["panel"] = f"{row['prompts']}, T {row['temperature']:g}"
    columns = CALL, AFTER, "tau"
    plot = Plot("parameters, M", columns, "method", "panel", log="x", reference=1.0)
    shown = [{name: row[name] for name in row if name != "panel"} for row in rows]
    return Result("Speed over size", rows, (plot,), shown={"Speed over size": shown})


def _rows(runs: list[Run], prompts: list[Prompt], target: Target, sampling: Sampling) -> Rows:
    """A row for each method and prompt set, speeds with 95 % intervals over prompts."""
    answers = {run.method: run.generations for run in runs}
    ids, reference, rows = token_ids(target, prompts), PlainReference(target, LIMITS), []
    for source, chosen in places_by_set(prompts).items():
        numbers = {name: [own[n].statistics for n in chosen] for name, own in answers.items()}
        for run in runs:
            own, name = numbers[run.method], run.method
            total = total_of(run, chosen)
            call = speed_ratio(own, numbers["transformers"], True)
            row = {"prompts": source, "method": name, "how": run.details.get(source, "")}
            row |= {"tokens/s": total.tokens_per_second, CALL: call[0], "95 %": _interval(call)}
            row |= dict.fromkeys((AFTER, "95 %, after", "tau"))
            if own[0].shares:
                rest = speed_ratio(own, numbers["plain"], False)
                tau = (total.tokens - total.answers) / total.target_forwards
                row |= {AFTER: rest[0], "95 %, after": _interval(rest), "tau": tau}
            others = [n for n in chosen if answers[name][n].ids != answers["plain"][n].ids]
            differing = [
                first_divergence(name, n, reference, ids[n], answers[name][n].ids)
                for n in others
                if sampling.greedy
            ]
            row["identical"] = f"{len(chosen) - len(others)}/{len(chosen)}"
            row |= _explained(differing)
            rows.append(row)
    return rows


def _explained(differing: list[Divergence | None]) -> dict[str, int | float | None]:
    """Of answers that differ from plain decoding's: how many do so at a numeric tie, the largest
    gap of these, and of how many the difference did not come again."""
    gaps = [each.gap for each in differing if each is not None and each.numeric_tie]
    again = {"ties": len(gaps), "largest gap of ties": max(gaps, default=None)}
    return again | {"not seen again": differing.count(None)}


def _interval(ratio: tuple[float, float, float]) -> str:
    return f"{ratio[1]:.2f} to {ratio[2]:.2f}"
