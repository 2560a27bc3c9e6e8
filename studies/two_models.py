"""Streams against a draft model: calls, seconds and the balance of Eq. 10 (Table 5, Figure 20).

Costs of forwards are the host's seconds by share (`Clock` of decoding/statistics.py): right on a
CPU, while on an accelerator the wait for a forward may fall outside of its share.
"""

from slipstream.core.errors import InputError
from slipstream.core.settings import Budget, Count
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.comparison import compare, summarise, task_sets
from slipstream.evaluation.methods import Method, Plain, Speculative
from slipstream.results.record import bounded
from studies import Plot, Prompt, Result, Target
from studies.decoding import GREEDY, LIMITS, speed_ratio

# zeta / beta of Figure 20: tokens per target call with the draft model, and with streams.
TOKEN_RATIOS = (1.0, 1.2, 1.4, 1.6)


def two_models(
    target: Target,
    prompts: list[Prompt],
    draft_model: DraftModel,
    streaming: Streaming,
    budget: Budget,
    repeats: Count,
) -> Result:
    """Both decode the prompts side by side, interleaved, beside plain decoding. Streams of shared
    mode verify with their own fine-tuned target, as in Table 5.

    budget: nodes of a draft, root included. Raises `InputError` for one that cuts the draft model
    short, whose chain is gamma of Eq. 10 long.
    """
    gamma = draft_model.num_tokens
    if budget <= gamma:
        raise InputError(
            f"study.budget: {budget} nodes, root included, cut short the draft model's chain of "
            f"{gamma} tokens; give at least {gamma + 1}, or lower study.draft_model.num_tokens"
        )
    methods: dict[str, Method] = {
        "plain": Plain(),
        "two models": Speculative(draft_model, budget),
        "streams": Speculative(streaming, budget),
    }
    runs = compare(methods, prompts, target, GREEDY, LIMITS, repeats, seed=0)
    records, rows = summarise(runs, prompts, str(target.dtype)), []
    for name, chosen in task_sets(prompts).items():
        own = {record["method"]: record for record in records if record["prompt_set"] == name}
        theirs, ours = ([run.generations[n].statistics for n in chosen] for run in runs[1:])
        ratio = speed_ratio(ours, theirs, True)
        rows += [_row(record, own["two models"], gamma, ratio) for record in own.values()]
    title = "Eq. 10 with C_ss = C_target (Figure 20)"
    across, up = "target / draft model", "streams / two models"
    curves = [
        {across: ratio, "zeta / beta": tokens}
        | {up: speed_over_two_models(gamma, 1, ratio, ratio, tokens, 1)}
        for tokens in TOKEN_RATIOS
        for ratio in range(2, 31, 2)
    ]
    plots = (
        Plot("prompts", ("ms per answer",), hue="method", kind="bar", label="tau"),
        Plot(across, (up,), hue="zeta / beta", reference=1.0, table=title),
    )
    return Result("Two models and streams (Table 5)", rows, plots, {title: curves})


def speed_over_two_models(
    gamma: int, draft: float, target: float, streams: float, zeta: float, beta: float
) -> float:
    """Eq. 10 as a ratio: what two models need for a token over what streams need, 1 at parity.

    gamma: forwards of the draft model per target call; draft, target: cost of one forward of the
    draft model and of the target when it verifies (C_draft, C_target); streams: of the target with
    streams, their drafting included (C_ss), all in one unit; zeta, beta: tokens per target call of
    two models and of streams.

    >>> round(speed_over_two_models(4, draft=1, target=10, streams=10, zeta=1.4, beta=1), 3)
    1.0
    """
    return (gamma * draft + target) / zeta / (streams / beta)


def _row(
    record: dict, other: dict, gamma: int, ratio: tuple[float, float, float]
) -> dict[str, object]:
    """A method on a prompt set, and of streams how much faster they are than the `other`, two
    models: by Eq. 10, and as measured, of whole calls, `ratio` with its 95 % over prompts.

    C_draft is 'draft, ms per draft call' (without an answer's first one, which reads the prompt:
    its seconds are part of the prefill), C_target 'verify, ms per target call' of two models, C_ss
    the sum of 'verify' and 'draft, ms per target call' of streams. zeta and beta are their taus.
    """
    # the draft model runs once for each token that it drafts
    calls = other["target_rows"] - other["target_forwards"]
    drafts, predicted, measured = calls if record is other else 0, None, None
    timed = max(1, calls - record["num_prompts"])
    verify = record["seconds_verify"] / record["target_forwards"]
    draft = record["seconds_draft"] / record["target_forwards"]
    if record["method"] == "streams":
        costs = other["seconds_draft"] / timed, other["seconds_verify"] / other["target_forwards"]
        predicted = speed_over_two_models(
            gamma, *costs, verify + draft, other["tau"], record["tau"]
        )
        measured = bounded(*ratio)
    return {
        "prompts": record["prompt_set"],
        "method": record["method"],
        "target calls": record["target_forwards"] / record["num_prompts"],
        "draft calls": drafts / record["num_prompts"],
        "ms per answer": 1000 * record["seconds"] / record["num_prompts"],
        "tau": record["tau"],
        "tau, 95 %": bounded(record["tau"], record["tau_low"], record["tau_high"]),
        "verify, ms per target call": 1000 * verify,
        "draft, ms per target call": 1000 * draft,
        "draft, ms per draft call": 1000 * record["seconds_draft"] / timed if drafts else None,
        "ROUGE-L": record["rouge_l"],
        "exact match": record["exact_match"],
        "over two models, Eq. 10": predicted,
        "over two models, measured, 95 %": measured,
        "details": record["details"],
    }
