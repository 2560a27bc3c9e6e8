"""Speed of rules for the draft length over the lengths they may begin with (GammaTune, Table 2)."""

from copy import deepcopy
from statistics import fmean, pstdev

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.drafters.draft_length import DraftLength, GammaTune, Heuristic
from slipstream.drafters.draft_model import DraftModel
from slipstream.evaluation.comparison import compare, overall
from slipstream.evaluation.methods import Method, Speculative
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.targets.target import Target


class DraftLengthStudy:
    """rules: by name, null for a fixed length; one of them must be called fixed. initial: lengths
    that they begin with; for those that do not follow the accepted tokens, the most they draft.
    most: the most that the others draft. Rules that carry their length from prompt to prompt are
    also tried without, as NAME_reset. repeats: how often a prompt is decoded by each."""

    def __init__(
        self,
        model: Target,
        rules: dict[str, DraftLength | None],
        initial: list[int],
        most: int,
        repeats: int,
    ):
        if rules.get("fixed", 0) is not None:
            raise InputError("study.rules: needs fixed: null, which the others are compared with")
        self.model, self.rules, self.initial = model, rules, initial
        self.most, self.repeats = most, repeats

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        methods: dict[str, Method] = {}
        for initial in self.initial:
            for name, drafter in self._drafters(initial).items():
                budget = drafter.num_tokens + 1
                methods[f"{name} {initial}"] = Speculative(drafter, budget)
        limits, dtype = Limits(96), str(target.dtype)
        runs = compare(methods, prompts, target, Sampling(), limits, self.repeats, seed=0)
        records = overall(runs, prompts, dtype)
        names = list(self._drafters(self.initial[0]))
        found = {name: [records[f"{name} {initial}"] for initial in self.initial] for name in names}
        speeds = {name: [record.tokens_per_second for record in own] for name, own in found.items()}
        fixed, spread = fmean(speeds["fixed"]), pstdev(speeds["fixed"])
        rows = [
            {
                "rule": name,
                "tokens/s, mean": fmean(own),
                "vs fixed": fmean(own) / fixed,
                "spread": pstdev(own) / fixed,
                "spread vs fixed": pstdev(own) / spread,
                "slowest": min(own) / fixed,
                "tau, mean": fmean(record.tau for record in found[name]),
                "identical": f"{sum(r.identical for r in found[name])}"
                f"/{sum(r.num_prompts for r in found[name])}",
            }
            for name, own in speeds.items()
        ]
        each = [
            {"begins with": initial} | {name: own[place] for name, own in speeds.items()}
            for place, initial in enumerate(self.initial)
        ]
        return Findings(
            "Rules for the draft length, over the lengths they begin with (GammaTune, Table 2)",
            rows,
            lambda figure: _draw(figure, self.initial, speeds),
            {"Tokens a second": each},
        )

    def _drafters(self, initial: int) -> dict[str, DraftModel]:
        found = {}
        for name, rule in self.rules.items():
            if not isinstance(rule, GammaTune | Heuristic):
                found[name] = DraftModel(self.model, initial, deepcopy(rule))
                continue
            for carry in (True, False):
                own = deepcopy(rule)
                own.initial = own.carried = initial
                own.carry = carry
                found[name if carry else f"{name}_reset"] = DraftModel(self.model, self.most, own)
        return found


def _draw(figure, initial: list[int], speeds: dict[str, list[float]]) -> None:
    axes = figure.subplots()
    for name, own in speeds.items():
        axes.plot(initial, own, ":" if name.endswith("_reset") else "-", marker=".", label=name)
    axes.set_xlabel("length begun with, or most tokens of a draft")
    axes.set_ylabel("tokens a second")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
