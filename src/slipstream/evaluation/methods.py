"""Ways to answer a prompt that are compared with one another: transformers' and ours.

Every method is given token ids and returns a `Generation`; how often and in which order they run is
`comparison.py`'s business.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal
from weakref import WeakValueDictionary

import torch

from slipstream.core.errors import InputError, naming
from slipstream.core.sampling import Sampling
from slipstream.core.settings import Budget, Inside, Positive, Share, Size, Text, checked
from slipstream.decoding.answer import Generation, Limits, decoded
from slipstream.decoding.calibrated import calibrated_decoder
from slipstream.decoding.calibration import Calibration, Drift
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.decoding.sprinter import SprinterDecoder
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.base import Drafter
from slipstream.evaluation.exactness import DraftlessReference, PlainReference, Reference
from slipstream.targets.loading import load_target, of_same_vocabulary
from slipstream.targets.target import Target


class Method(ABC):
    """Base of all ways to answer.

    exact: whether the output keeps the target's distribution; drafter: name, or None; reference:
    what its greedy output must equal, None for plain decoding of the run's target; store_bytes:
    memory of what drafts are looked up in, for the last batch; details: what its name does not say
    of how it answers the prompt set that was last expected; learns: whether later answers depend on
    earlier ones, until it forgets.
    """

    exact: bool = True
    drafter: str | None = None
    reference: Reference | None = None
    store_bytes: int = 0
    details: str = ""
    learns: bool = False
    decoder: Decoder
    _ready_for: tuple[Target, Sampling, Limits] | None = None

    def ready(self, target: Target, sampling: Sampling, limits: Limits) -> None:
        """Prepare to answer so; where that was done before, nothing is done again."""
        if self._ready_for != (target, sampling, limits):
            self.prepare(target, sampling, limits)
            self._ready_for = target, sampling, limits

    @abstractmethod
    def prepare(self, target: Target, sampling: Sampling, limits: Limits) -> None:
        """Load what is needed, `decoder` if it is one of ours; `InputError` for what is unfit."""

    def generate(self, prompts: list[list[int]], seeds: list[int]) -> list[Generation]:
        """Answer a batch of prompts; their statistics are shares of the batch."""
        return self.decoder.generate_batch(prompts, seeds)

    def expect(self, prompt_set: str) -> None:
        """Called before prompts of this set come."""

    def forget(self) -> None:
        """Forget what earlier prompts taught."""


def prepared(
    field: str,
    made: dict[str, Callable[[], Method]],
    target: Target,
    sampling: Sampling,
    limits: Limits,
    leave_out_unfit: bool,
) -> dict[str, Method]:
    """The methods of config `field`, by name, ready to answer. One that cannot be made or does not
    fit is left out with a note, or ends in the `InputError` that names it."""
    found = {}
    for name, make in made.items():
        try:
            with naming(f"{field}.{name}"):
                method = make()
                method.ready(target, sampling, limits)
                found[name] = method
        except InputError as error:
            if not leave_out_unfit:
                raise
            print(f"note: left out {error}")
    return found


class Plain(Method):
    """Our plain decoding: one forward, one token; target: of its own, None for the run's."""

    def __init__(self, target: Target | None = None):
        self.target = target

    def prepare(self, target: Target, sampling: Sampling, limits: Limits) -> None:
        self.decoder = PlainDecoder(self.target or target, sampling, limits)
        self.reference = PlainReference(self.target, limits) if self.target else None


class Speculative(Method):
    """Our engine with one drafter and trees of up to `budget` nodes, or 'auto' for what was
    calibrated, to be found in the folder `calibrations`; target: of its own, None for the run's."""

    @checked
    def __init__(
        self,
        drafter: Drafter,
        budget: Budget | Literal["auto"],
        target: Target | None = None,
        calibrations: Text = "runs/calibrations",
    ):
        self._drafter, self.budget, self.target = drafter, budget, target
        self.calibrations = calibrations
        self._found: Calibration | None = None
        self._drift: Drift | None = None
        self.drafter = type(drafter).__name__

    @property
    def store_bytes(self) -> int:
        return self._attached.memory()

    @property
    def learns(self) -> bool:
        return self._attached.learns

    @property
    def details(self) -> str:
        said = [] if self._found is None else [f"calibrated: {self._found.choice}"]
        if self._drift is not None and self._drift.noticed:
            said.append("steps are not as calibrated")
        if self.learns:
            said.append("stores kept" if self._attached.keeps else "learns from prompt to prompt")
        return ", ".join(filter(None, [*said, self._attached.details]))

    def prepare(self, target: Target, sampling: Sampling, limits: Limits) -> None:
        given = self.target or target
        self.reference = self._drift = None
        self._attached = self._drafter.attach(given)
        if self.budget == "auto":
            self._found, self.decoder = calibrated_decoder(
                self.calibrations, given, self._drafter, self._attached, sampling, limits
            )
            self._attached = getattr(self.decoder, "attached", self._attached)
            choice = f"{self._found.way} drafts {self._found.budget} nodes, as calibrated"
            beaten = f"no draft of {self.drafter} beats plain decoding here, so it decodes plainly"
            print(f"note: {beaten if self._found.plain else choice}")
        else:
            self.decoder = Engine(given, self._attached, sampling, limits, self.budget)
        if self.decoder.target is not given:
            self.reference = DraftlessReference(given, self._attached, limits)
        elif given is not target:
            self.reference = PlainReference(given, limits)

    def generate(self, prompts: list[list[int]], seeds: list[int]) -> list[Generation]:
        if self._found is not None and len(prompts) > 1:
            raise InputError(
                "budget: auto was calibrated for one prompt at a time; give a number of nodes with "
                "batch_size above 1"
            )
        answers = super().generate(prompts, seeds)
        if self._drift is not None:
            self._drift.watch([answer.statistics for answer in answers])
        return answers

    def forget(self) -> None:
        """What comes now is measured: from here on a drift is noticed, too."""
        self._attached.forget()
        if self._found is not None and self._drift is None:
            self._drift = Drift(self._found.seconds)


class Sprinter(Method):
    """SPRINTER, which is approximate: `draft` writes, and a verifier (or its folder) says when the
    target is asked; verifier, cap, ratio, threshold: as in `SprinterDecoder`."""

    exact, drafter = False, "Sprinter"

    def __init__(
        self,
        draft: Target,
        verifier: Text | Share,
        cap: Size,
        ratio: Positive = 1.0,
        threshold: Inside = 0.5,
    ):
        self.models, self.settings = (draft, verifier), (ratio, threshold, cap)

    def prepare(self, target: Target, sampling: Sampling, limits: Limits) -> None:
        self.decoder = SprinterDecoder(target, *self.models, sampling, limits, *self.settings)
        if self.decoder.verifier is not None and sampling != Sampling(1.0):
            print(
                "note: SPRINTER's verifier was trained on drafts at temperature 1 without top-k "
                "and top-p; with other sampling it judges what it has not seen"
            )


_ORDINARY: WeakValueDictionary[str, Target] = WeakValueDictionary()
"""Targets in the ordinary layout of their weights, one for all methods of transformers."""


class Transformers(Method):
    """transformers' own `generate` on the same weights, as its users have it.

    assistant: a draft model for assisted generation; prompt_lookup_num_tokens: for prompt lookup.
    """

    def __init__(self, assistant: Text | None = None, prompt_lookup_num_tokens: Size | None = None):
        self.assistant, self.prompt_lookup_num_tokens = assistant, prompt_lookup_num_tokens
        lookup = "PromptLookup" if prompt_lookup_num_tokens else None
        self.drafter = "DraftModel" if assistant else lookup

    def prepare(self, target: Target, sampling: Sampling, limits: Limits) -> None:
        from transformers import GenerationConfig

        if limits.stop or limits.end_ids is not None:
            raise InputError(
                "methods: transformers' generate would not end where limits.stop and "
                "limits.end_ids say; leave its methods out, as with methods.transformers=null"
            )
        dtype, device = str(target.dtype).removeprefix("torch."), str(target.device)
        key = json.dumps([target.name, dtype, device, target.loading], default=str)
        self.target = _ORDINARY.get(key)
        if self.target is None:
            self.target = load_target(target.name, dtype, device, packed=False, **target.loading)
            _ORDINARY[key] = self.target
        # What a model's own config may ask for besides, such as penalties, is left out, as by us.
        ends = sorted(self.target.end_ids)
        self.target.model.generation_config = GenerationConfig(eos_token_id=ends or None)
        self.limits = limits
        self.options: dict[str, object] = {"do_sample": not sampling.greedy}
        self.options["prompt_lookup_num_tokens"] = self.prompt_lookup_num_tokens
        if not sampling.greedy:
            self.options["temperature"] = sampling.temperature
            self.options |= {"top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
        if self.assistant:
            draft = load_target(self.assistant, dtype, device, packed=False)
            if of_same_vocabulary(draft, self.target, "assistant") is not draft:
                raise InputError(
                    "assistant: transformers takes no draft model whose vocabulary is padded "
                    "otherwise; leave its methods out, as with methods.transformers=null"
                )
            self.options["assistant_model"] = draft.model

    def _count(self, *_) -> None:
        self.forwards += 1

    def generate(self, prompts: list[list[int]], seeds: list[int]) -> list[Generation]:
        rooms, longest = self.limits.check_prompts(self.target, prompts), max(map(len, prompts))
        learned = not hasattr(self.target.family.decoder, "rotary_emb")
        beyond = learned and longest + max(rooms) > self.target.max_positions
        if self.drafter is not None or beyond:  # transformers drafts for one prompt at a time
            return [self._generate([ids], own)[0] for ids, own in zip(prompts, seeds, strict=True)]
        return self._generate(prompts, seeds[0])

    def _generate(self, prompts: list[list[int]], seed: int) -> list[Generation]:
        torch.manual_seed(seed)
        self.forwards = 0
        started = time.perf_counter()
        rooms, longest = self.limits.check_prompts(self.target, prompts), max(map(len, prompts))
        missing, end = [longest - len(ids) for ids in prompts], next(iter(self.target.end_ids), 0)
        ids = [[end] * count + ids for count, ids in zip(missing, prompts, strict=True)]
        mask = [[0] * count + [1] * (longest - count) for count in missing]
        with self.target.model.register_forward_pre_hook(self._count):
            output = self.target.model.generate(
                torch.tensor(ids, device=self.target.device),
                attention_mask=torch.tensor(mask, device=self.target.device),
                max_new_tokens=max(rooms),
                pad_token_id=end,
                **self.options,
            )
        answers = zip(output[:, longest:].tolist(), rooms, strict=True)
        seconds = (time.perf_counter() - started) / len(prompts)
        return [self._generation(answer[:room], seconds) for answer, room in answers]

    def _generation(self, answer: list[int], seconds: float) -> Generation:
        """Of a row of the output: the answer up to its end token, and what it took."""
        ends = (place for place, token in enumerate(answer) if token in self.target.end_ids)
        ids = answer[: next(ends, len(answer)) + 1]
        took = Statistics(1, len(ids), len(ids) - 1, seconds)
        if self.drafter is not None:
            # The first forward already verifies, so there is no prefill to leave out; each decides
            # one token itself.
            drafted = max(0, len(ids) - self.forwards)
            took = Statistics(0, len(ids), self.forwards, seconds, drafted=drafted)
        text = decoded(self.target.tokenizer, ids)
        return Generation(ids, text, "end" if ids[-1] in self.target.end_ids else "length", took)
