"""Ever larger targets of the same function: what each way to decode gains where a forward is bound
by its weights. Sizes are written once, as folders (`studies.enlargement`)."""

import gc
import json
from pathlib import Path

from slipstream.core.files import key_of, write_json
from slipstream.core.sampling import Sampling
from slipstream.decoding.calibration import Calibrations, calibrate, calibration_key, described
from slipstream.drafters.base import Drafter
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.auto import Auto
from slipstream.evaluation.comparison import Run, compare
from slipstream.evaluation.exactness import PlainReference, first_divergence
from slipstream.evaluation.methods import Method, Plain, Speculative, Transformers
from slipstream.evaluation.metrics import ratio_interval
from slipstream.evaluation.prompts import PromptSets
from slipstream.targets.loading import load_target
from slipstream.targets.quantized import weight_bytes
from studies import Plot, Prompt, Result, Rows, Target
from studies.decoding import LIMITS, token_ids
from studies.enlargement import write

# Chains of the draft model and of prompt lookup may be so long; the calibrated budget cuts them.
LONGEST = 32
CALL, AFTER = "vs generate, whole calls", "vs plain, after the prefill"


def scale(
    target: Target,
    prompts: list[Prompt],
    sizes: list[str],
    untrained: dict[str, Drafter],
    top_k: int,
    prune_threshold: float,
    temperatures: list[float],
    budgets: list[int],
    calibration: PromptSets,
    calibration_prompts: int,
    repeats: int,
    folder: str,
    dtype: str,
) -> Result:
    """At each of `sizes` (of `studies.enlargement.SHAPES`, or 'small' for the shipped models):
    transformers' `generate` and assisted generation, plain decoding, streams of both schedules and
    pruned, the draft model, the drafters `untrained`, and the fastest of ours.

    `calibration_prompts` prompts of `calibration` choose the number of nodes of every drafter, and
    the fastest, at each size and temperature. folder: where models and calibrations go, and the
    rows of each size: what is there is not made again.
    """
    chosen_on = calibration.take(calibration_prompts)
    rows: Rows = []
    for size in sizes:
        paths = [f"slipstream/small-{part}" for part in ("target", "draft", "streaming")]
        if size != "small":
            place = write(Path(folder) / size, size, dtype)
            paths = [str(place / part) for part in ("target", "draft", "streaming")]
        large = load_target(paths[0], dtype, target.device.type)
        draft = load_target(paths[1], dtype, target.device.type)
        drafters: dict[str, Drafter] = {
            "streams, deferred": Streaming(paths[2], "deferred", top_k),
            "streams, fused": Streaming(paths[2], "fused", top_k),
            "streams, fused, pruned": Streaming(paths[2], "fused", top_k, prune_threshold),
            "draft model": DraftModel(draft, LONGEST),
        } | untrained
        for temperature in temperatures:
            asked = [prompt.text for prompt in chosen_on + prompts], described(drafters), budgets
            key = key_of(size, dtype, temperature, repeats, *asked)
            kept = Path(folder) / f"{size}-{key}.json"
            if kept.exists():
                rows += json.loads(kept.read_text(encoding="utf-8"))
                continue
            sampling = Sampling(temperature)
            calibrations = Calibrations(Path(folder) / "calibrations")
            for drafter in drafters.values():
                key = calibration_key(large, described(drafter), sampling)
                if key in calibrations:
                    continue
                ways = drafter.variants(drafter.attach(large))
                ids = token_ids(large, chosen_on)
                found = calibrate(large, ways, ids, sampling, LIMITS, budgets, 1)
                calibrations.save(key, found)
            methods = _methods(drafters, paths[1], str(calibrations.folder))
            methods["auto"] = _auto(methods, chosen_on, large, sampling)
            runs = compare(methods, prompts, large, sampling, LIMITS, repeats, seed=0)
            millions = weight_bytes(large.model) / large.dtype.itemsize / 1e6
            shared = {"size": size, "parameters, M": millions, "temperature": temperature}
            own = [shared | row for row in _rows(runs, prompts, large, sampling)]
            write_json(kept, own)
            rows += own
        large = draft = drafters = methods = runs = None  # before the next ones are loaded
        gc.collect()
    for row in rows:
        row["panel"] = f"{row['prompts']}, T {row['temperature']:g}"
    columns = CALL, AFTER, "tau"
    plot = Plot("parameters, M", columns, "method", "panel", log="x", reference=1.0)
    shown = [{name: row[name] for name in row if name != "panel"} for row in rows]
    return Result("Speed over size", rows, (plot,), shown={"Speed over size": shown})


def _methods(drafters: dict[str, Drafter], draft: str, calibrations: str) -> dict[str, Method]:
    """What is measured, by name; budgets as calibrated."""
    theirs = {"transformers": Transformers(), "transformers, assisted": Transformers(draft)}
    ours = {
        name: Speculative(drafter, "auto", calibrations=calibrations)
        for name, drafter in drafters.items()
    }
    return theirs | {"plain": Plain()} | ours


def _auto(
    methods: dict[str, Method], prompts: list[Prompt], target: Target, sampling: Sampling
) -> Auto:
    """The fastest of our methods on each set of `prompts`."""
    ours = {name: each for name, each in methods.items() if not isinstance(each, Transformers)}
    auto = Auto(ours, len(prompts))
    auto.choose(prompts, target, sampling, LIMITS)
    return auto


def _rows(runs: list[Run], prompts: list[Prompt], target: Target, sampling: Sampling) -> Rows:
    """A row for each method and prompt set, speeds with 95 % intervals over prompts."""
    by_name = {run.method: run for run in runs}
    ids, reference = token_ids(target, prompts), PlainReference(target, LIMITS)
    rows = []
    for source in dict.fromkeys(prompt.source for prompt in prompts):
        chosen = [place for place, prompt in enumerate(prompts) if prompt.source == source]
        whole, after = (
            _sides(by_name[name], chosen, prefill)
            for name, prefill in (("transformers", True), ("plain", False))
        )
        for run in runs:
            numbers = [run.generations[place].statistics for place in chosen]
            forwards, tokens = (
                sum(getattr(each, name) for each in numbers)
                for name in ("target_forwards", "tokens")
            )
            different = [
                place for place in chosen
                if run.generations[place].ids != by_name["plain"].generations[place].ids
            ]  # fmt: skip
            ties = [
                first_divergence(run.method, place, reference, ids[place],
                                 run.generations[place].ids)
                for place in different
                if sampling.greedy
            ]  # fmt: skip
            own = _sides(run, chosen, True)
            call = ratio_interval(own, whole)
            rest = ratio_interval(_sides(run, chosen, False), after)
            row = {"prompts": source, "method": run.method, "how": run.details.get(source, "")}
            row |= {"tokens/s": tokens / sum(own[1]), CALL: call[0], "95 %": _interval(call)}
            if numbers[0].shares:
                row |= {AFTER: rest[0], "95 %, after": _interval(rest)}
                row |= {"tau": sum(each.tokens - each.answers for each in numbers) / forwards}
            else:
                row |= {AFTER: None, "95 %, after": None, "tau": None}
            row["identical"] = f"{len(chosen) - len(different)}/{len(chosen)}"
            row["ties"] = sum(tie is None or tie.numeric_tie for tie in ties)
            rows.append(row)
    return rows


def _sides(run: Run, chosen: list[int], prefill: bool) -> tuple[list[float], list[float]]:
    """Tokens and seconds of the chosen answers, the prefill and its token counted or not."""
    numbers = [run.generations[place].statistics for place in chosen]
    if prefill:
        return [each.tokens for each in numbers], [each.seconds for each in numbers]
    seconds = [each.seconds - each.shares.get("prefill", 0.0) for each in numbers]
    return [each.tokens - each.answers for each in numbers], seconds


def _interval(ratio: tuple[float, float, float]) -> str:
    return f"{ratio[1]:.2f} to {ratio[2]:.2f}"
