"""What studies decode with: greedily, 96 tokens, and what they take from a comparison."""

from rich.progress import track

from slipstream.core.sampling import Sampling
from slipstream.data.rendering import Sample, render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.base import Attached
from slipstream.evaluation.comparison import ALL_SETS, Record, Run, compare, overall
from slipstream.evaluation.methods import Method
from studies import Prompt, Target

GREEDY, LIMITS = Sampling(), Limits(96)
# Columns of tables, and the fields of a comparison's records that they show.
COLUMNS = {
    "tokens/s": "tokens_per_second",
    "vs plain": "speedup_vs_plain",
    "tau": "tau",
    "prefill, s": "seconds_prefill",
    "draft, s": "seconds_draft",
    "verify, s": "seconds_verify",
    "other, s": "seconds_overhead",
    "ROUGE-Lsum": "rouge_lsum",
    "exact match": "exact_match",
}


def columns(record: dict, *names: str) -> dict[str, object]:
    """The columns `names` of a record, then how many answers are plain decoding's."""
    found = {name: record[COLUMNS[name]] for name in names}
    return found | {"identical": f"{record['identical']}/{record['num_prompts']}"}


def task_sets(prompts: list[Prompt]) -> dict[str, list[int]]:
    """Indices of each set's prompts, and of all, where there are several sets."""
    sets = {
        name: [index for index, prompt in enumerate(prompts) if prompt.source == name]
        for name in dict.fromkeys(prompt.source for prompt in prompts)
    }
    return sets | ({ALL_SETS: [*range(len(prompts))]} if len(sets) > 1 else {})


def token_ids(target: Target, prompts: list[Prompt]) -> list[list[int]]:
    return [render_prompt(target.tokenizer, prompt.text) for prompt in prompts]


def engine(target: Target, drafter: Attached, budget: int, limits: Limits = LIMITS) -> Engine:
    """Drafts have `budget` nodes."""
    return Engine(target, drafter, GREEDY, limits, budget)


def decode(engine: Engine, prompts: list[list[int]]) -> Statistics:
    """Answer token-id `prompts` one after the other; the sum of their statistics."""
    answers = track(prompts, description="decoding")
    return sum((engine.generate(ids).statistics for ids in answers), Statistics())


def answered(target: Target, prompts: list[Prompt]) -> list[Sample]:
    """The prompts with the target's own answers."""
    decoder = PlainDecoder(target, GREEDY, LIMITS)
    given = track(token_ids(target, prompts), description="answers")
    return [Sample(ids + decoder.generate(ids).ids, len(ids)) for ids in given]


def compared(
    target: Target, methods: dict[str, Method], prompts: list[Prompt], repeats: int
) -> tuple[list[Run], dict[str, Record]]:
    """All `methods`, interleaved: their runs, and their records over all prompts by name."""
    runs = compare(methods, prompts, target, GREEDY, LIMITS, repeats, seed=0)
    return runs, overall(runs, prompts, str(target.dtype))
