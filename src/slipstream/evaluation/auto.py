"""Of several methods the fastest on each prompt set, found by trying them on other prompts."""

from slipstream.core.errors import InputError, naming
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Generation, Limits
from slipstream.decoding.statistics import Statistics
from slipstream.evaluation.comparison import compare, total_of
from slipstream.evaluation.methods import Method, prepared
from slipstream.evaluation.prompts import Prompt
from slipstream.targets.target import Target

HEATS = 2
"""Most rounds of trials, each on twice as many prompts as the one before."""


class Auto(Method):
    """candidates: methods by name, None where one is left out; num_prompts: how many prompts of
    each set they are tried on. In each of up to two heats the faster half goes on to twice as many
    prompts, so all are tried on a third of the prompts and the faster half on all of them
    (successive halving). leave_out_unfit: whether candidates that do not fit the target are left
    out, in place of an `InputError`.

    Plain decoding should be one of them: then a set on which no draft pays is decoded plainly.
    """

    drafter = "Auto"

    def __init__(
        self,
        candidates: dict[str, Method | None] | None,
        num_prompts: int,
        leave_out_unfit: bool = False,
    ):
        self.candidates = {name: each for name, each in (candidates or {}).items() if each}
        if not self.candidates:
            raise InputError("candidates: name at least one method")
        self.num_prompts, self.leave_out_unfit = num_prompts, leave_out_unfit
        self.choices: dict[str, str] = {}
        self.chosen: Method | None = None

    @property
    def exact(self) -> bool:
        return all(method.exact for method in self.candidates.values())

    def ready(self, target: Target, sampling: Sampling, limits: Limits) -> None:
        made = {name: (lambda each=each: each) for name, each in self.candidates.items()}
        field = f"{self.path}.candidates".lstrip(".")
        self.candidates = prepared(field, made, target, sampling, limits, self.leave_out_unfit)
        if not self.candidates:
            raise InputError(f"{field}: none of them fits the target; name at least one that does")

    def choose(
        self,
        prompts: list[Prompt],
        target: Target,
        sampling: Sampling,
        limits: Limits,
        batch_size: int = 1,
    ) -> None:
        """Try candidates on `prompts`, `batch_size` at a time; note the fastest on each set."""
        self.ready(target, sampling, limits)

        def fastest(prompts: list[Prompt]) -> str:
            """By tokens a second over all prompts that a candidate has been tried on."""
            names, count = list(self.candidates), max(1, len(prompts) // (2**HEATS - 1))
            totals = dict.fromkeys(names, Statistics())
            while prompts and len(names) > 1:
                heat, prompts = prompts[:count], prompts[count:]
                methods = {name: self.candidates[name] for name in names}
                for run in compare(methods, heat, target, sampling, limits, 1, 0, batch_size):
                    totals[run.method] += total_of(run, range(len(heat)))
                names.sort(key=lambda name: totals[name].tokens_per_second, reverse=True)
                names, count = names[: (len(names) + 1) // 2], 2 * count
            return names[0]

        for name in dict.fromkeys(prompt.source for prompt in prompts):
            self.choices[name] = fastest([each for each in prompts if each.source == name])
        for name in set(self.choices.values()):
            if self.candidates[name].reference is not None:
                field = f"{self.path}.candidates.{name}".lstrip(".")
                raise InputError(
                    f"{field}: it decodes a target of its own, whose answers differ from the "
                    f"others'; leave it out with {field}=null"
                )
        print("auto: " + ", ".join(f"{method} on {name}" for name, method in self.choices.items()))

    def expect(self, prompt_set: str) -> None:
        if prompt_set not in self.choices:
            with naming(self.path):
                raise InputError(
                    f"auto: it has not tried its candidates on {prompt_set}; give more prompts of "
                    "that set, or leave auto out"
                )
        self.chosen = self.candidates[self.choices[prompt_set]]
        self.chosen.expect(prompt_set)
        self.expected = prompt_set

    def generate(self, prompts: list[list[int]], seeds: list[int]) -> list[Generation]:
        return self.chosen.generate(prompts, seeds)

    def forget(self) -> None:
        for method in self.candidates.values():
            method.forget()

    @property
    def store_bytes(self) -> int:
        return self.chosen.store_bytes

    @property
    def details(self) -> str:
        return ", ".join(filter(None, [self.choices[self.expected], self.chosen.details]))
