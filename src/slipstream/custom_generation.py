"""Decoding inside transformers' own `generate`, as its `custom_generate`."""

import inspect
from collections.abc import Sequence

import torch

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.base import Drafter
from slipstream.targets.loading import target_of
from slipstream.targets.target import token_ids

# What transformers makes of the generation settings that our own sampling and limits cover.
KEPT_BY_US = (
    "TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper MaxLengthCriteria EosTokenCriteria"
).split()
# What transformers hands to every decoding method, and what decoding here has its own of.
NOT_NEEDED = (
    "attention_mask cache_position logits_to_keep past_key_values position_ids use_cache"
).split()


def custom_generate(
    model,
    input_ids: torch.Tensor,
    generation_config=None,
    drafter: Drafter | None = None,
    budget: int = 12,
    seed: int | None = None,
    logits_processor: Sequence = (),
    stopping_criteria: Sequence = (),
    streamer=None,
    **model_kwargs,
):
    """For `model.generate(ids, custom_generate=slipstream.custom_generate, drafter=...)`.

    Keeps max_new_tokens, do_sample, temperature, top_k, top_p, eos_token_id, attention_mask (of a
    left-padded prompt), streamer and return_dict_in_generate. seed: None draws one from torch's
    global generator. Returns (1, T) prompt and answer, or transformers' output object with them.
    Raises `InputError` for more than one prompt, and for all that it would not keep.
    """
    if drafter is None:
        raise InputError("drafter: name the drafter to decode with, e.g. drafter=Streaming(...)")
    if input_ids.shape[0] != 1:
        raise InputError(
            "input_ids: one prompt at a time, with one beam and one answer; call generate for each"
        )
    config = generation_config
    _check_kept(config, [*logits_processor, *stopping_criteria], model_kwargs)
    sampling = Sampling()
    if config.do_sample:
        sampling = Sampling(
            1.0 if config.temperature is None else config.temperature,
            config.top_k or None,
            config.top_p,
        )
    limits = Limits(config.max_length - input_ids.shape[1], end_ids=token_ids(config.eos_token_id))
    target = target_of(model)
    engine = Engine(target, drafter.attached(target), sampling, limits, budget)
    streamer = _streamer_of_caller() if streamer is None else streamer
    callback = None
    if streamer is not None:
        callback = lambda token, _, __: streamer.put(torch.tensor([token]))  # noqa: E731
    if seed is None:
        seed = int(torch.randint(2**62, ())) if config.do_sample else 0
    prompt = _unpadded(input_ids[0], model_kwargs.get("attention_mask"))
    answer = engine.generate(prompt, seed, callback).ids
    if streamer is not None:
        streamer.end()
    sequences = torch.cat([input_ids, input_ids.new_tensor([answer])], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)


def _check_kept(config, parts: Sequence, model_kwargs: dict) -> None:
    """`InputError` for a setting of `model.generate` that decoding here would not keep."""
    given = [name for name, value in model_kwargs.items() if value is not None]
    unkept = [type(part).__name__ for part in parts if type(part).__name__ not in KEPT_BY_US]
    unkept += [name for name in given if name not in NOT_NEEDED]
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        unkept.append("past_key_values")
    if config.return_dict_in_generate:
        outputs = "scores", "logits", "attentions", "hidden_states"
        unkept += [f"output_{name}" for name in outputs if getattr(config, f"output_{name}")]
    if unkept:
        raise InputError(
            f"custom_generate: {unkept[0]} is not supported; leave out the generation setting it "
            "stands for"
        )


def _unpadded(ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """(T,) ids without the padding before them, as a mask (1, T) tells it (None: there is none)."""
    if mask is None:
        return ids.tolist()
    shown = mask[0].bool().tolist()
    start = shown.index(True) if True in shown else len(shown)
    if not all(shown[start:]):
        raise InputError("attention_mask: only tokens before the prompt may be hidden; pad left")
    return ids[start:].tolist()


def _streamer_of_caller():
    """`model.generate` keeps its streamer from a callable, but has put the prompt into it and lets
    somebody wait for its end."""
    frame = inspect.currentframe()
    while frame is not None:
        called = frame.f_globals.get("__name__"), frame.f_code.co_name
        if called == ("transformers.generation.utils", "generate"):
            return frame.f_locals.get("streamer")
        frame = frame.f_back
    return None
