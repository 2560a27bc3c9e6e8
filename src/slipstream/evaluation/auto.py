"""Of several methods the fastest on each prompt set, found by trying them on other prompts."""

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Generation, Limits
from slipstream.evaluation.comparison import compare, summarise
from slipstream.evaluation.methods import Method
from slipstream.evaluation.prompts import Prompt
from slipstream.targets.target import Target


class Auto(Method):
    """candidates: methods by name; num_prompts: how many prompts of each set they are tried on, all
    of them on a third, and the `finalists` fastest of these on the others, too.

    Plain decoding should be one of them: then a set on which no draft pays is decoded plainly.
    """

    drafter = "Auto"

    def __init__(self, candidates: dict[str, Method], num_prompts: int, finalists: int):
        if not candidates:
            raise InputError("methods.auto.candidates: name at least one method")
        if finalists < 1:
            raise InputError("methods.auto.finalists: must be at least 1")
        self.candidates, self.num_prompts, self.finalists = candidates, num_prompts, finalists
        self.exact = all(method.exact for method in candidates.values())
        self.choices: dict[str, str] = {}
        self.chosen: Method | None = None

    def choose(
        self, prompts: list[Prompt], target: Target, sampling: Sampling, limits: Limits
    ) -> None:
        """Try candidates on `prompts`, and note the fastest on each set."""
        for name in dict.fromkeys(prompt.source for prompt in prompts):
            own = [prompt for prompt in prompts if prompt.source == name]
            heat = max(1, len(own) // 3)
            speeds = self._speeds(list(self.candidates), own[:heat], target, sampling, limits)
            best = sorted(speeds, key=speeds.get, reverse=True)[: self.finalists]
            if own[heat:] and len(best) > 1:
                speeds = self._speeds(best, own, target, sampling, limits)
            self.choices[name] = max(best, key=speeds.get)
        print("auto: " + ", ".join(f"{method} on {name}" for name, method in self.choices.items()))

    def _speeds(
        self,
        names: list[str],
        prompts: list[Prompt],
        target: Target,
        sampling: Sampling,
        limits: Limits,
    ) -> dict[str, float]:
        """Tokens a second of candidates, on prompts of one set."""
        methods = {name: self.candidates[name] for name in names}
        runs = compare(methods, prompts, target, sampling, limits, 1, seed=0)
        records = summarise(runs, prompts, str(target.dtype))
        return {record.method: record.tokens_per_second for record in records}

    def prepare(self, target: Target, sampling: Sampling, limits: Limits) -> None:
        if not self.choices:
            raise InputError("methods.auto: nothing was tried yet; give it prompts to choose by")
        for name in set(self.choices.values()):
            self.candidates[name].prepare(target, sampling, limits)

    def expect(self, prompt_set: str) -> None:
        if prompt_set not in self.choices:
            raise InputError(
                f"methods.auto: it has not tried its candidates on {prompt_set}; give more prompts "
                "of that set, or leave auto out with methods.auto=null"
            )
        self.chosen = self.candidates[self.choices[prompt_set]]

    def generate(self, prompts: list[list[int]], seeds: list[int]) -> list[Generation]:
        return self.chosen.generate(prompts, seeds)

    def forget(self) -> None:
        for method in self.candidates.values():
            method.forget()

    @property
    def store_bytes(self) -> int:
        return self.chosen.store_bytes
