"""Decoding as a plain Python call, and as transformers' `generate(custom_generate=...)`."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Generation, Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.base import Drafter
from slipstream.drafters.streaming import Streaming
from slipstream.targets.compiled import compile_target
from slipstream.targets.loading import fingerprint, load_target
from slipstream.targets.target import Target

SMALL_TARGET, SMALL_SPECULATOR = "slipstream/small-target", "slipstream/small-streaming"
# What transformers makes of the generation settings that our own sampling and limits cover.
KEPT_BY_US = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MaxLengthCriteria",
    "EosTokenCriteria",
)


def generate(
    prompt: str,
    target: Target | str = SMALL_TARGET,
    drafter: Drafter | str = SMALL_SPECULATOR,
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[str] = (),
    seed: int = 0,
    budget: int = 10,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Answer one prompt; the output is the target's own, only faster.

    target: a `Target`, or the name of one to load (kept for later calls). drafter: a `Drafter`, or
    the folder of a streaming speculator. budget: nodes of a draft tree, root included. on_text:
    called with each piece of text as it is decided. Raises `InputError` for what cannot be used.
    """
    target = _loaded(target) if isinstance(target, str) else target
    if isinstance(drafter, str):
        drafter = _streaming(drafter, target)
    sampling = Sampling(temperature, top_k, top_p)
    limits = Limits(max_new_tokens, tuple(stop))
    engine = Engine(target, drafter, sampling, limits, budget)
    callback = None if on_text is None else _text_callback(target, on_text)
    return engine.generate(render_prompt(target.tokenizer, prompt), seed, callback)


def custom_generate(
    model,
    input_ids: torch.Tensor,
    generation_config=None,
    drafter: Drafter | None = None,
    budget: int = 10,
    seed: int = 0,
    logits_processor: Sequence = (),
    stopping_criteria: Sequence = (),
    **unused,
) -> torch.Tensor:
    """For `model.generate(ids, custom_generate=slipstream.custom_generate, drafter=...)`.

    Takes max_new_tokens, do_sample, temperature, top_k and top_p from the generation config.
    Returns (1, T) prompt and answer. Raises `InputError` for more than one prompt, and for logits
    processors and stopping criteria it could not keep.
    """
    if drafter is None:
        raise InputError("drafter: name the drafter to decode with, e.g. drafter=Streaming(...)")
    if input_ids.shape[0] != 1:
        raise InputError("input_ids: one prompt at a time; call generate for each of them")
    for part in (*logits_processor, *stopping_criteria):
        if type(part).__name__ not in KEPT_BY_US:
            raise InputError(
                f"custom_generate: {type(part).__name__} is not supported; leave out the "
                "generation setting it stands for"
            )
    target = Target(model)
    target.fingerprint = fingerprint(target)
    config = generation_config
    sampling = Sampling()
    if config.do_sample:
        sampling = Sampling(
            1.0 if config.temperature is None else config.temperature,
            config.top_k or None,
            config.top_p,
        )
    prompt = input_ids[0].tolist()
    limits = Limits(config.max_length - len(prompt))
    engine = Engine(target, drafter, sampling, limits, budget)
    answer = engine.generate(prompt, seed).ids
    return torch.tensor([prompt + answer], device=input_ids.device)


@lru_cache(maxsize=1)
def _streaming(folder: str, _: Target) -> Streaming:
    """One drafter for all calls with a target, so that what was made for it is made once."""
    return Streaming(folder, "auto", top_k=4)


@lru_cache(maxsize=1)
def _loaded(name: str) -> Target:
    return compile_target(load_target(name), "auto")


def _text_callback(target: Target, on_text: Callable[[str], None]) -> Callable[[int, bool], None]:
    """Turn decided tokens into decided text (a character may need several tokens)."""
    ids: list[int] = []
    shown = ""

    def take(token: int, _: bool) -> None:
        nonlocal shown
        ids.append(token)
        text = target.tokenizer.decode(ids, skip_special_tokens=True)
        if text.startswith(shown) and not text.endswith("\ufffd"):
            on_text(text[len(shown) :])
            shown = text

    return take
