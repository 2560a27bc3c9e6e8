"""Ways to answer a prompt that are compared with one another: transformers' and ours.

Every method is given token ids and returns a `Generation`; how often and in which order they run is
`comparison.py`'s business.
"""

import time
from typing import Protocol

import torch

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Generation, Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.base import Drafter
from slipstream.evaluation.exactness import DraftlessReference, PlainReference, Reference
from slipstream.targets.loading import load_target
from slipstream.targets.target import Target


class Method(Protocol):
    """exact: whether the output keeps the target's distribution; drafter: name, or None; reference:
    what its greedy output must equal, None for plain decoding of the run's target."""

    exact: bool
    drafter: str | None
    reference: Reference | None

    def prepare(self, target: Target, sampling: Sampling, limits: Limits) -> None:
        """Load what is needed; called once."""

    def generate(self, prompt_ids: list[int], seed: int) -> Generation:
        """Answer one prompt."""


class Plain:
    """Our plain decoding: one forward, one token; target: of its own, None for the run's."""

    exact, drafter = True, None

    def __init__(self, target: Target | None = None):
        self.target = target

    def prepare(self, target: Target, sampling: Sampling, limits: Limits) -> None:
        self.decoder = PlainDecoder(self.target or target, sampling, limits)
        self.reference = PlainReference(self.target, limits) if self.target else None

    def generate(self, prompt_ids: list[int], seed: int) -> Generation:
        return self.decoder.generate(prompt_ids, seed)


class Speculative:
    """Our engine with one drafter and trees of up to `budget` nodes; target: of its own, None for
    the run's."""

    def __init__(self, drafter: Drafter, budget: int, target: Target | None = None):
        self._drafter, self.budget, self.target = drafter, budget, target
        self.exact, self.drafter = drafter.exact, type(drafter).__name__

    def prepare(self, target: Target, sampling: Sampling, limits: Limits) -> None:
        given = self.target or target
        self.engine = Engine(given, self._drafter, sampling, limits, self.budget)
        self.reference = None
        if self.engine.target is not given:
            self.reference = DraftlessReference(given, self._drafter, limits)
        elif given is not target:
            self.reference = PlainReference(given, limits)

    def generate(self, prompt_ids: list[int], seed: int) -> Generation:
        return self.engine.generate(prompt_ids, seed)


class Transformers:
    """transformers' own `generate` on the same weights, as its users have it.

    assistant: a draft model for assisted generation; prompt_lookup_num_tokens: for prompt lookup.
    """

    exact, reference = True, None

    def __init__(self, assistant: str | None = None, prompt_lookup_num_tokens: int | None = None):
        self.assistant, self.prompt_lookup_num_tokens = assistant, prompt_lookup_num_tokens
        self.drafter = "DraftModel" if assistant else None
        self.drafter = "PromptLookup" if prompt_lookup_num_tokens else self.drafter

    def prepare(self, target: Target, sampling: Sampling, limits: Limits) -> None:
        dtype = str(target.dtype).removeprefix("torch.")
        device = target.device.type
        self.target = load_target(target.name, dtype, device, False, target.adapter)
        self.limits, self.sampling = limits, sampling
        self.options: dict[str, object] = {"do_sample": not sampling.greedy}
        if not sampling.greedy:
            self.options |= {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k or 0,
                "top_p": sampling.top_p or 1.0,
            }
        if self.assistant:
            draft = load_target(self.assistant, dtype, device, packed=False)
            self.options["assistant_model"] = draft.model
        if self.prompt_lookup_num_tokens:
            self.options["prompt_lookup_num_tokens"] = self.prompt_lookup_num_tokens
        self.forwards = 0
        self.target.model.register_forward_pre_hook(self._count)

    def _count(self, *_) -> None:
        self.forwards += 1

    def generate(self, prompt_ids: list[int], seed: int) -> Generation:
        torch.manual_seed(seed)
        self.forwards = 0
        started = time.perf_counter()
        (room,) = self.limits.check_prompts(self.target, [prompt_ids])
        ids = torch.tensor([prompt_ids], device=self.target.device)
        output = self.target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=room,
            pad_token_id=next(iter(self.target.end_ids), 0),
            **self.options,
        )
        answer = output[0, len(prompt_ids) :].tolist()
        seconds = time.perf_counter() - started
        # With a draft the first forward already verifies, so there is no prefill to leave out.
        drafting = self.drafter is not None
        statistics = Statistics(
            answers=0 if drafting else 1,
            tokens=len(answer),
            target_forwards=self.forwards - (0 if drafting else 1),
            seconds=seconds,
        )
        text = self.target.tokenizer.decode(answer, skip_special_tokens=True)
        finished = "end" if answer[-1] in self.target.end_ids else "length"
        return Generation(answer, text, finished, statistics)
