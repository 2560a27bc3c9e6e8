"""Of several methods the fastest on each prompt set, found by trying them on other prompts."""

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Generation, Limits
from slipstream.evaluation.comparison import ALL_SETS, compare, summarise
from slipstream.evaluation.methods import Method
from slipstream.evaluation.prompts import Prompt
from slipstream.targets.target import Target


class Auto(Method):
    """candidates: methods by name; num_prompts: how many prompts of each set they are tried on.

    Plain decoding should be one of them: then a set on which no draft pays is decoded plainly.
    """

    drafter = "Auto"

    def __init__(self, candidates: dict[str, Method], num_prompts: int):
        if not candidates:
            raise InputError("methods.auto.candidates: name at least one method")
        self.candidates, self.num_prompts = candidates, num_prompts
        self.exact = all(method.exact for method in candidates.values())
        self.choices: dict[str, str] = {}
        self.chosen: Method | None = None

    def choose(
        self, prompts: list[Prompt], target: Target, sampling: Sampling, limits: Limits
    ) -> None:
        """Try all candidates on `prompts`, and note the fastest on each set."""
        runs = compare(self.candidates, prompts, target, sampling, limits, 1, seed=0)
        best: dict[str, float] = {}
        for record in summarise(runs, prompts, str(target.dtype)):
            speed, prompt_set = record.tokens_per_second, record.prompt_set
            if prompt_set != ALL_SETS and speed > best.get(prompt_set, 0.0):
                best[prompt_set], self.choices[prompt_set] = speed, record.method
        print("auto: " + ", ".join(f"{method} on {name}" for name, method in self.choices.items()))

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
