"""Throughput of plain decoding and of a drafter by batch size (Figure 18, appendix L)."""

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.drafters.base import Drafter
from slipstream.evaluation.comparison import compare, overall
from slipstream.evaluation.methods import Method, Plain, Speculative
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.targets.target import Target


class BatchStudy:
    """Trees of each of `budgets` nodes, for batches of each of `batch_sizes` prompts. A batch's
    speed is against plain decoding of the same batches, interleaved. Prefills are the same on both
    sides; what a drafter must beat are plain decoding's steps.

    Raises `InputError` when there are fewer prompts than the largest batch has.
    """

    def __init__(self, drafter: Drafter, batch_sizes: list[int], budgets: list[int], repeats: int):
        self.drafter, self.repeats = drafter, repeats
        self.batch_sizes, self.budgets = batch_sizes, budgets

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        if len(prompts) < max(self.batch_sizes):
            raise InputError(
                f"num_prompts: {len(prompts)} do not fill a batch of {max(self.batch_sizes)}; "
                "give more, or smaller study.batch_sizes"
            )
        rows = [row for size in self.batch_sizes for row in self._rows(target, prompts, size)]
        title = "Batches (Figure 18)"
        return Findings(title, rows, lambda figure: _draw(figure, rows))

    def _rows(self, target: Target, prompts: list[Prompt], size: int) -> list[dict]:
        methods: dict[str, Method] = {"plain": Plain()}
        methods |= {str(nodes): Speculative(self.drafter, nodes) for nodes in self.budgets}
        runs = compare(methods, prompts, target, Sampling(), Limits(96), self.repeats, 0, size)
        records = overall(runs, prompts, str(target.dtype))
        return [
            {
                "batch": size,
                "nodes": nodes,
                "plain, tokens/s": records["plain"].tokens_per_second,
                "tokens/s": records[str(nodes)].tokens_per_second,
                "speed vs plain": records[str(nodes)].speedup_vs_plain,
                "tau": records[str(nodes)].tau,
                "prefill, s": records[str(nodes)].seconds_prefill,
                "plain steps, s": records["plain"].seconds_verify,
                "draft, s": records[str(nodes)].seconds_draft,
                "verify, s": records[str(nodes)].seconds_verify,
                "other, s": records[str(nodes)].seconds_overhead,
                "identical": f"{records[str(nodes)].identical}/{len(prompts)}",
            }
            for nodes in self.budgets
        ]


def _draw(figure, rows: list[dict]) -> None:
    axes = figure.subplots(1, 2)
    for nodes in dict.fromkeys(row["nodes"] for row in rows):
        chosen = [row for row in rows if row["nodes"] == nodes]
        sizes = [row["batch"] for row in chosen]
        axes[0].plot(sizes, [row["speed vs plain"] for row in chosen], "-o", label=f"{nodes} nodes")
        axes[1].plot(sizes, [row["tokens/s"] for row in chosen], "-o", label=f"{nodes} nodes")
    plain = {row["batch"]: row["plain, tokens/s"] for row in rows}
    axes[1].plot(plain.keys(), plain.values(), "--", color="grey", label="plain")
    axes[0].axhline(1.0, color="grey", linewidth=0.8)
    for part, title in zip(axes, ("speed vs plain, same batch", "tokens/s"), strict=True):
        part.set_title(title)
        part.set_xlabel("prompts in a batch")
        part.set_xscale("log", base=2)
        part.spines[["top", "right"]].set_visible(False)
    axes[1].legend(fontsize=8)
