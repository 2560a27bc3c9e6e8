"""Side-by-side runs: the same prompts through every method, interleaved, in one process.

Each prompt is answered by all methods in turn before the next prompt, in an order drawn anew each
time, in several passes over all prompts; per prompt and method the median run counts. So drift of
the machine, and what a method leaves in its caches, hit all alike. What a method learns from its
answers it forgets between passes. A run that is gone on with compares answers of one process alone
(docs/resuming.md).
"""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from statistics import fmean

from pydantic import TypeAdapter
from rich.progress import Progress, track

from slipstream.core.errors import InputError
from slipstream.core.resuming import Part
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Generation, Limits
from slipstream.decoding.statistics import Statistics
from slipstream.evaluation.methods import Method
from slipstream.evaluation.metrics import rate_interval, ratio_interval, rouge, sql_exact_match
from slipstream.evaluation.prompts import Prompt, places_by_set
from slipstream.results.record import Rows
from slipstream.targets.target import Target

ALL_SETS = "all"
GENERATIONS = TypeAdapter(list[Generation])
"""Makes them of what `asdict` made of them, through JSON."""
PARTS = ("prefill", "draft", "verify")
METRICS = {
    "rouge_1": partial(rouge, "rouge1"),
    "rouge_l": partial(rouge, "rougeL"),
    "rouge_lsum": partial(rouge, "rougeLsum"),
    "exact_match": sql_exact_match,
}


@dataclass
class Run:
    """What one method did with each prompt: the median run of each, in the prompts' order.

    batch_size: prompts answered together; expected: greedy answers of the method's own reference;
    store_bytes: most memory of what drafts are looked up in, by prompt set; details: what else
    there is to say of how it decoded each set.
    """

    method: str
    drafter: str | None
    exact: bool
    batch_size: int = 1
    expected: list[list[int]] | None = None
    generations: list[Generation] = field(default_factory=list)
    store_bytes: dict[str, int] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)


def compare(
    methods: dict[str, Method],
    prompts: list[Prompt],
    target: Target,
    sampling: Sampling,
    limits: Limits,
    repeats: int,
    seed: int,
    batch_size: int = 1,
) -> list[Run]:
    """Run every method on every prompt `repeats` times, interleaved, after a warm-up.

    Prompts are answered `batch_size` at a time, those of a batch being of one set.
    """
    batches = batches_of(prompts, batch_size)
    if not methods:
        raise InputError("methods: nothing to run; name at least one method")
    ids = [render_prompt(target.tokenizer, prompt.text) for prompt in prompts]
    for method in methods.values():
        method.ready(target, sampling, limits)
    runs = {name: Run(name, m.drafter, m.exact, batch_size) for name, m in methods.items()}
    names, chance = list(methods), random.Random(seed)

    def took(answers: list[Generation]) -> float:
        return sum(answer.statistics.seconds for answer in answers)

    def asked(method: Method, batch: list[int]) -> list[Generation]:
        method.expect(prompts[batch[0]].source)
        return method.generate([ids[place] for place in batch], [seed + place for place in batch])

    def found(method: Method, batch: list[int]) -> list:
        answers = asked(method, batch)
        return [[asdict(answer) for answer in answers], method.store_bytes, method.details]

    with Progress() as progress:
        task = progress.add_task("decoding", total=len(ids) * len(names) * repeats)
        # Compilation waits for the first rows of each shape: let all shapes come before timing, and
        # twice, since buffers that grow for one of them forget the graphs of those before.
        for method in [*methods.values()] * (2 if target.compiled else 1):
            for batch in ([0], *(batches if target.compiled else batches[:1])):
                asked(method, batch)
        tries: dict[str, list] = {name: [[] for _ in batches] for name in names}
        kept = Part(ids)
        for turn in range(repeats):
            # so many batches of this pass, from its first, have an answer of every method
            whole = (all(kept.has(turn, n, name) for name in names) for n in range(len(batches)))
            done = next((number for number, each in enumerate(whole) if not each), len(batches))
            for method in methods.values():
                method.forget()  # the answers of this pass are new to it
                for batch in batches[:done] if method.learns and done < len(batches) else ():
                    asked(method, batch)
            for number, batch in enumerate(batches):
                source = prompts[batch[0]].source
                for name in chance.sample(names, len(names)):
                    method, run = methods[name], runs[name]
                    find = partial(found, method, batch)
                    said = kept.kept((turn, number, name), find, anew=number >= done)
                    answers, store_bytes, run.details[source] = said
                    tries[name][number].append(GENERATIONS.validate_python(answers))
                    run.store_bytes[source] = max(run.store_bytes.get(source, 0), store_bytes)
                    progress.advance(task, len(batch))
        for name in names:
            median: dict[int, Generation] = {}
            for batch, own in zip(batches, tries[name], strict=True):
                # of an even number of runs either of the middle two, by chance
                middle = (repeats - chance.randrange(2)) // 2
                median |= zip(batch, sorted(own, key=took)[middle], strict=True)
            runs[name].generations = [median[place] for place in range(len(ids))]
    for name, method in methods.items():
        if sampling.greedy and method.drafter and method.reference:
            answers = track(ids, description="its reference")
            runs[name].expected = [method.reference.generate(prompt) for prompt in answers]
    return list(runs.values())


def task_sets(prompts: list[Prompt]) -> dict[str, list[int]]:
    """Places of each set's prompts, and of all, where there are several sets."""
    sets = places_by_set(prompts)
    return sets | ({ALL_SETS: [*range(len(prompts))]} if len(sets) > 1 else {})


def summarise(runs: list[Run], prompts: list[Prompt], dtype: str) -> Rows:
    """A record per method, those without a drafter first, for each prompt set, and one for all of
    them together: the lines of the results.

    Seconds are sums over the prompts; low and high bound 95 % of tau, prompts drawn again, or of a
    speedup, batches drawn again; target_rows: positions that the forwards after prefill worked on;
    accepted_lengths: how many steps kept so many drafted tokens; rouge_1 ...: means over prompts
    that have references, None where none has.

    Outputs are compared with those of the method's own reference if it has one, else with those of
    `transformers`, else of `plain`, else of the first method; speeds with `transformers` and
    `plain`; each where it was run.
    """
    return [
        _record(run, runs, name, chosen, prompts, dtype)
        for name, chosen in task_sets(prompts).items()
        for run in sorted(runs, key=lambda run: run.drafter is not None)
    ]


def expected_answers(run: Run, runs: list[Run]) -> list[list[int]]:
    """What the answers of `run` are compared with."""
    if run.expected is not None:
        return run.expected
    named = {run.method: run for run in runs}
    reference = named.get("transformers") or named.get("plain") or runs[0]
    return [answer.ids for answer in reference.generations]


def _together(details: dict[str, str]) -> str:
    """What there is to say of a method, by prompt set where that differs.

    >>> _together({"a": "rest", "b": "anpd"}), _together({"a": "kept", "b": "kept"})
    ('a: rest; b: anpd', 'kept')
    """
    if len(set(details.values())) == 1:
        return next(iter(details.values()))
    return "; ".join(f"{name}: {said}" for name, said in details.items() if said)


def batches_of(prompts: list[Prompt], size: int) -> list[list[int]]:
    """Places of the prompts that are answered together: up to `size` of one set, in their order."""
    sets = places_by_set(prompts).values()
    return sorted(own[n : n + size] for own in sets for n in range(0, len(own), size))


def total_of(run: Run, chosen: Iterable[int]) -> Statistics:
    """What a method took for these prompts."""
    return sum((run.generations[place].statistics for place in chosen), Statistics())


def _record(
    run: Run, runs: list[Run], prompt_set: str, chosen: list[int], prompts: list[Prompt], dtype: str
) -> dict[str, object]:
    total, expected = total_of(run, chosen), expected_answers(run, runs)
    answers = [run.generations[place] for place in chosen]
    sets = list(dict.fromkeys(prompts[place].source for place in chosen))
    steps = [answer.statistics for answer in answers]
    counts = [e.tokens - e.answers for e in steps], [e.target_forwards for e in steps]
    tau_low, tau_high = rate_interval(*counts) if total.target_forwards else (1.0, 1.0)
    measured = scores(answers, [prompts[place] for place in chosen])
    batches = [own for own in batches_of(prompts, run.batch_size) if own[0] in chosen]
    return dict(
        method=run.method,
        details=_together({name: run.details[name] for name in sets}),
        drafter=run.drafter,
        prompt_set=prompt_set,
        exact=run.exact,
        dtype=dtype,
        num_prompts=len(chosen),
        identical=sum(run.generations[place].ids == expected[place] for place in chosen),
        tokens=total.tokens,
        tokens_per_second=total.tokens_per_second,
        **_speedup("transformers", run, runs, batches),
        **_speedup("plain", run, runs, batches),
        tau=total.tau,
        tau_low=tau_low,
        tau_high=tau_high,
        tau_mean_over_prompts=sum(answer.statistics.tau for answer in answers) / len(answers),
        mean_accepted_draft_tokens=total.mean_accepted_draft_tokens,
        target_forwards=total.target_forwards,
        target_rows=total.target_rows,
        seconds=total.seconds,
        **{f"seconds_{part}": total.shares.get(part, 0.0) for part in PARTS},
        seconds_overhead=total.overhead,
        store_bytes=max(map(run.store_bytes.__getitem__, sets)),
        accepted_lengths=dict(sorted(Counter(chain(*(a.accepted for a in answers))).items())),
        ended=sum(answer.finished == "end" for answer in answers),
        **{n: own and fmean(x for x in own if x is not None) for n, own in measured.items()},
    )


def _speedup(other: str, run: Run, runs: list[Run], batches: list) -> dict[str, float | None]:
    """Over the method called `other`, with its bounds; None where that was not run."""
    base = next((each for each in runs if each.method == other), None)
    found = (None, None, None)
    if base:
        sides = [[total_of(each, batch) for batch in batches] for each in (run, base)]
        ours, theirs = (([e.tokens for e in own], [e.seconds for e in own]) for own in sides)
        found = ratio_interval(ours, theirs)
    names = (f"speedup_vs_{other}{end}" for end in ("", "_low", "_high"))
    return dict(zip(names, found, strict=True))


def scores(
    answers: list[Generation], prompts: list[Prompt]
) -> dict[str, list[float | None] | None]:
    """Each metric's score of each answer, None where a prompt has no references; None where none
    has."""
    pairs = [(a.text, list(p.references)) for a, p in zip(answers, prompts, strict=True)]
    if not any(known for _, known in pairs):
        return dict.fromkeys(METRICS)
    return {
        name: [score(text, known) if known else None for text, known in pairs]
        for name, score in METRICS.items()
    }
