"""Streams against a draft model: calls, seconds and the balance of Eq. 10 (Table 5, Figure 20).

Costs of forwards are the host's seconds by share (`core/clock.py`): right on a CPU, while on an
accelerator the wait for a forward may fall outside of its share.
"""

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Generation, Limits
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.comparison import ALL_SETS, Record, compare, summarise
from slipstream.evaluation.methods import Method, Plain, Speculative
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.targets.target import Target

PLAIN, TWO_MODELS, STREAMS = "plain", "two models", "streams"
TOKEN_RATIOS = (1.0, 1.2, 1.4, 1.6)
"""zeta / beta of Figure 20: tokens per target call with the draft model, and with streams."""


class TwoModelStudy:
    """Both decode the prompts side by side, interleaved, beside plain decoding. Streams of shared
    mode verify with their own fine-tuned target, as in Table 5.

    budget: nodes of a draft, root included. Raises `InputError` for one that cuts the draft model
    short, whose chain is gamma of Eq. 10 long.
    """

    def __init__(self, draft_model: DraftModel, streaming: Streaming, budget: int, repeats: int):
        if budget <= draft_model.num_tokens:
            raise InputError(
                f"study.budget: {budget} nodes, root included, cut short the draft model's chain "
                f"of {draft_model.num_tokens} tokens; give at least {draft_model.num_tokens + 1}, "
                "or lower study.draft_model.num_tokens"
            )
        self.draft_model, self.streaming = draft_model, streaming
        self.budget, self.repeats = budget, repeats

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        two_models = _Counting(self.draft_model, self.budget)
        methods: dict[str, Method] = {
            PLAIN: Plain(),
            TWO_MODELS: two_models,
            STREAMS: Speculative(self.streaming, self.budget),
        }
        runs = compare(methods, prompts, target, Sampling(), Limits(96), self.repeats, seed=0)
        records = summarise(runs, prompts, str(target.dtype).removeprefix("torch."))
        gamma, rows = self.draft_model.num_tokens, []
        for name in dict.fromkeys(record.prompt_set for record in records):
            chosen = {record.method: record for record in records if record.prompt_set == name}
            calls = sum(
                two_models.calls[tuple(render_prompt(target.tokenizer, prompt.text))]
                for prompt in prompts
                if name in (prompt.source, ALL_SETS)
            )
            rows += [_row(record, calls, chosen, gamma) for record in chosen.values()]
        title = "Two models and streams (Table 5)"
        return Findings(title, rows, lambda figure: _draw(figure, rows, gamma))


class _Counting(Speculative):
    """Speculative decoding that counts the draft model's forwards, by prompt."""

    def prepare(self, target: Target, sampling: Sampling, limits: Limits) -> None:
        super().prepare(target, sampling, limits)
        self.calls: dict[tuple[int, ...], int] = {}
        self._count = 0
        self._drafter.model.family.layers[0].register_forward_pre_hook(self._counted)

    def _counted(self, *_) -> None:
        self._count += 1

    def generate(self, prompts: list[list[int]], seeds: list[int]) -> list[Generation]:
        self._count = 0
        answers = super().generate(prompts, seeds)
        (prompt,) = prompts
        self.calls[tuple(prompt)] = self._count
        return answers


def speed_over_two_models(
    gamma: int, draft: float, target: float, streams: float, zeta: float, beta: float
) -> float:
    """Eq. 10 as a ratio: what two models need for a token over what streams need, 1 at parity.

    gamma: forwards of the draft model per target call; draft, target: cost of one forward of the
    draft model and of the target when it verifies (C_draft, C_target); streams: of the target with
    streams, their drafting included (C_ss); zeta, beta: tokens per target call of two models and of
    streams. Costs are in one unit, whichever it is.

    >>> round(speed_over_two_models(4, draft=1, target=10, streams=10, zeta=1.4, beta=1), 3)
    1.0
    """
    return (gamma * draft + target) / zeta / (streams / beta)


def _row(
    record: Record, draft_calls: int, chosen: dict[str, Record], gamma: int
) -> dict[str, object]:
    """A method on a prompt set, and beside streams how much faster than two models they are: by
    Eq. 10, and as measured, in tokens per second with everything included.

    Of the costs in Eq. 10 C_draft is 'draft, ms per draft call' (the draft model's pass over the
    prompt is one of the calls) and C_target 'verify, ms per target call' of two models; C_ss is the
    sum of 'verify' and 'draft, ms per target call' of streams. zeta and beta are their taus.
    """
    predicted = measured = per_draft_call = None
    if record.method == TWO_MODELS:
        per_draft_call = 1000 * record.seconds_draft / draft_calls
    if record.method == STREAMS:
        other = chosen[TWO_MODELS]
        predicted = speed_over_two_models(
            gamma,
            draft=other.seconds_draft / draft_calls,
            target=other.seconds_verify / other.target_forwards,
            streams=(record.seconds_verify + record.seconds_draft) / record.target_forwards,
            zeta=other.tau,
            beta=record.tau,
        )
        measured = record.tokens_per_second / other.tokens_per_second
    return {
        "prompts": record.prompt_set,
        "method": record.method,
        "target calls": record.target_forwards / record.num_prompts,
        "draft calls": draft_calls / record.num_prompts if record.method == TWO_MODELS else 0.0,
        "ms per answer": 1000 * record.seconds / record.num_prompts,
        "tau": record.tau,
        "verify, ms per target call": 1000 * record.seconds_verify / record.target_forwards,
        "draft, ms per target call": 1000 * record.seconds_draft / record.target_forwards,
        "draft, ms per draft call": per_draft_call,
        "ROUGE-L": record.rouge_l,
        "exact match": record.exact_match,
        "over two models, Eq. 10": predicted,
        "over two models, measured": measured,
    }


def _draw(figure, rows: list[dict], gamma: int) -> None:
    """Left: the measured seconds. Right: Eq. 10 with C_ss = C_target, as in Figure 20."""
    axes = figure.subplots(1, 2)
    sets = list(dict.fromkeys(row["prompts"] for row in rows))
    for place, (method, color) in enumerate(((PLAIN, "C7"), (TWO_MODELS, "C1"), (STREAMS, "C0"))):
        seconds = [row["ms per answer"] for row in rows if row["method"] == method]
        where = [number + 0.3 * place for number in range(len(sets))]
        bars = axes[0].bar(where, seconds, width=0.28, color=color, label=method)
        axes[0].bar_label(bars, fmt="%.0f", fontsize=7)
    axes[0].set_xticks([number + 0.3 for number in range(len(sets))], sets)
    axes[0].legend(fontsize=8)
    axes[0].set_ylabel("ms per answer")
    latency = [ratio / 2 for ratio in range(4, 61)]
    for tokens in TOKEN_RATIOS:
        speedup = [
            speed_over_two_models(gamma, 1, ratio, ratio, zeta=tokens, beta=1) for ratio in latency
        ]
        axes[1].plot(latency, speedup, label=f"zeta / beta = {tokens}")
    axes[1].axhline(1.0, color="grey", linewidth=0.8)
    axes[1].set_xlabel("latency of the target / of the draft model")
    axes[1].set_ylabel(f"speed of streams over two models, gamma {gamma}")
    axes[1].legend(fontsize=8)
    for part in axes:
        part.spines[["top", "right"]].set_visible(False)
