"""Streams against a draft model: calls, seconds and the balance of Eq. 10 (Table 5, Figure 20)."""

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
    """Both decode the prompts side by side, interleaved, beside plain decoding."""

    def __init__(self, draft_model: DraftModel, streaming: Streaming, budget: int, repeats: int):
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
        rows = []
        for name in dict.fromkeys(record.prompt_set for record in records):
            chosen = {record.method: record for record in records if record.prompt_set == name}
            calls = sum(
                two_models.calls[tuple(render_prompt(target.tokenizer, prompt.text))]
                for prompt in prompts
                if name in (prompt.source, ALL_SETS)
            )
            rows += [_row(record, calls, chosen) for record in chosen.values()]
        gamma = self.draft_model.num_tokens
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

    def generate(self, prompt_ids: list[int], seed: int) -> Generation:
        self._count = 0
        answer = super().generate(prompt_ids, seed)
        self.calls[tuple(prompt_ids)] = self._count
        return answer


def _row(record: Record, draft_calls: int, chosen: dict[str, Record]) -> dict[str, object]:
    """Eq. 10 balances seconds of drafting and verifying per token; what it predicts is the speed of
    streams over two models."""
    predicted = measured = None
    if record.method == STREAMS:
        other = chosen[TWO_MODELS]
        predicted = _step_seconds_per_token(other) / _step_seconds_per_token(record)
        measured = other.seconds / record.seconds
    return {
        "prompts": record.prompt_set,
        "method": record.method,
        "target calls": record.target_forwards / record.num_prompts,
        "draft calls": draft_calls / record.num_prompts if record.method == TWO_MODELS else 0.0,
        "ms per answer": 1000 * record.seconds / record.num_prompts,
        "tau": record.tau,
        "verify, ms per target call": 1000 * record.seconds_verify / record.target_forwards,
        "draft, ms per target call": 1000 * record.seconds_draft / record.target_forwards,
        "ROUGE-L": record.rouge_l,
        "exact match": record.exact_match,
        "over two models, Eq. 10": predicted,
        "over two models, measured": measured,
    }


def _step_seconds_per_token(record: Record) -> float:
    seconds = (record.seconds_verify + record.seconds_draft) / record.target_forwards
    return seconds / record.tau


def _draw(figure, rows: list[dict], gamma: int) -> None:
    """Left: the measured seconds. Right: Eq. 10 with C_ss = C_target, as in Figure 20."""
    axes = figure.subplots(1, 2)
    bars = axes[0].bar(
        [f"{row['prompts']}\n{row['method']}" for row in rows],
        [row["ms per answer"] for row in rows],
        color=[{PLAIN: "C7", TWO_MODELS: "C1", STREAMS: "C0"}[row["method"]] for row in rows],
    )
    axes[0].bar_label(bars, fmt="%.0f", fontsize=8)
    axes[0].tick_params(axis="x", labelsize=6)
    axes[0].set_ylabel("ms per answer")
    latency = [ratio / 2 for ratio in range(4, 61)]
    for tokens in TOKEN_RATIOS:
        speedup = [(gamma + ratio) / (ratio * tokens) for ratio in latency]
        axes[1].plot(latency, speedup, label=f"zeta / beta = {tokens}")
    axes[1].axhline(1.0, color="grey", linewidth=0.8)
    axes[1].set_xlabel("latency of the target / of the draft model")
    axes[1].set_ylabel(f"speed of streams over two models, gamma {gamma}")
    axes[1].legend(fontsize=8)
    for part in axes:
        part.spines[["top", "right"]].set_visible(False)
