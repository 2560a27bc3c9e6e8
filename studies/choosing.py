"""The choice at every step (`auto`) beside the drafters it chooses among, on prompts never
used to build it, its exploration included."""

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.core.settings import Budget, Count, NotNegative
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.auto import Auto
from slipstream.drafters.base import Drafter
from slipstream.evaluation.comparison import compare
from slipstream.evaluation.methods import Method, Plain, Speculative
from slipstream.evaluation.prompts import places_by_set
from slipstream.results.record import bounded
from studies import Plot, Prompt, Result, Rows, Target
from studies.decoding import LIMITS, speed_ratio


def choosing(
    target: Target,
    prompts: list[Prompt],
    drafters: dict[str, Drafter],
    budget: Budget,
    draws: Count,
    temperature: NotNegative,
    repeats: Count,
) -> Result:
    """Plain decoding, each of `drafters` alone, and the choice among them, side by side.

    draws: the prompts of each set are dealt out into so many parts; for each the choice begins
    anew, knowing nothing. Ratios are of whole calls, with 95 % over prompts; the best drafter of a
    part is known afterwards alone, and may be none.
    """
    methods: dict[str, Method] = {"plain": Plain()}
    methods |= {name: Speculative(drafter, budget) for name, drafter in drafters.items()}
    methods["auto"] = Speculative(Auto(drafters), budget)
    sets = places_by_set(prompts)
    fewest = min(map(len, sets.values()))
    if fewest < draws:
        raise InputError(
            f"study.draws: {fewest} prompts of a set leave one of {draws} draws without any; give "
            "more num_prompts, or fewer draws"
        )
    rows: Rows = []
    for draw in range(draws):
        own = [prompts[place] for places in sets.values() for place in places[draw::draws]]
        runs = compare(methods, own, target, Sampling(temperature), LIMITS, repeats, seed=draw)
        for name, chosen in places_by_set(own).items():
            numbers = {
                run.method: [run.generations[place].statistics for place in chosen] for run in runs
            }
            rows.append({"prompts": name, "draw": draw + 1, "count": len(chosen)} | _row(numbers))
    plot = Plot(
        "draw", ("auto / best",), panel="prompts", kind="point",
        interval={"auto / best": ("auto / best, low", "auto / best, high")}, reference=1.0,
    )  # fmt: skip
    return Result("The choice at every step", rows, (plot,))


def _row(numbers: dict[str, list[Statistics]]) -> dict[str, object]:
    """Of one part of a set: every drafter's speed over plain decoding, and the choice's over plain
    decoding and over the fastest of all others."""
    ratios = {name: speed_ratio(own, numbers["plain"], True) for name, own in numbers.items()}
    auto = ratios.pop("auto")
    best = max(ratios, key=lambda name: ratios[name][0])
    beside = speed_ratio(numbers["auto"], numbers[best], True)
    del ratios["plain"]
    return {
        **{name: bounded(*ratio) for name, ratio in ratios.items()},
        "auto": bounded(*auto),
        "best": best,
        **dict(zip(("auto / best", "auto / best, low", "auto / best, high"), beside, strict=True)),
    }
