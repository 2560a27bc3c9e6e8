"""Speed and tau where answers are sampled among the k most probable tokens (Figure 12b)."""

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.drafters.base import Drafter
from slipstream.evaluation.comparison import compare, overall
from slipstream.evaluation.methods import Method, Plain, Speculative
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.targets.target import Target


class TopKSamplingStudy:
    """Plain decoding and a drafter's, interleaved, at `temperature`; `top_ks` of 1 is greedy."""

    def __init__(
        self, drafter: Drafter, budget: int, top_ks: list[int], temperature: float, repeats: int
    ):
        self.drafter, self.budget = drafter, budget
        self.top_ks, self.temperature, self.repeats = top_ks, temperature, repeats

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        rows = [self._row(target, prompts, top_k) for top_k in self.top_ks]
        title = f"Top-k sampling at temperature {self.temperature} (Figure 12b)"
        return Findings(title, rows, lambda figure: _draw(figure, rows))

    def _row(self, target: Target, prompts: list[Prompt], top_k: int) -> dict:
        methods: dict[str, Method] = {
            "plain": Plain(),
            "drafted": Speculative(self.drafter, self.budget),
        }
        sampling = Sampling(self.temperature, top_k)
        runs = compare(methods, prompts, target, sampling, Limits(96), self.repeats, seed=0)
        record = overall(runs, prompts, str(target.dtype))["drafted"]
        return {
            "top-k": top_k,
            "tau": record.tau,
            "speed vs plain": record.speedup_vs_plain,
            "draft, s": record.seconds_draft,
            "verify, s": record.seconds_verify,
            "other, s": record.seconds_overhead,
        }


def _draw(figure, rows: list[dict]) -> None:
    axes = figure.subplots()
    for column in ("tau", "speed vs plain"):
        axes.plot([row["top-k"] for row in rows], [row[column] for row in rows], "-o", label=column)
    axes.set_xscale("log")
    axes.set_xlabel("k")
    axes.set_ylim(bottom=0)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
