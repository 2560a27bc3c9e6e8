"""Decoding inside transformers' own `generate`, as its `custom_generate`: a callable, or the folder
of a speculator."""

import inspect
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from slipstream.assets import locate
from slipstream.core.errors import InputError
from slipstream.core.files import times_of
from slipstream.core.sampling import Sampling
from slipstream.core.settings import Seed, checked
from slipstream.core.transfer import right_padded
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.base import Drafter
from slipstream.speculators.checkpoint import from_pretrained
from slipstream.targets.loading import target_of
from slipstream.targets.packed import is_packed, pack_linears, reordering_pays
from slipstream.targets.target import token_ids

# What transformers makes of the generation settings that our own sampling and limits cover.
KEPT_BY_US = (
    "TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper MaxLengthCriteria EosTokenCriteria"
).split()
# What transformers hands to every decoding method, and what decoding here has its own of.
NOT_NEEDED = (
    "attention_mask cache_position logits_to_keep past_key_values position_ids use_cache"
).split()
MODES = "greedy_search", "sample"
BESIDE_TARGET = "speculator"
"""The folder of a speculator in the folder of its target."""


def custom_generate(
    model,
    input_ids: torch.Tensor,
    generation_config=None,
    drafter: Drafter | None = None,
    budget: int = 12,
    seed: int | None = None,
    packed: bool = False,
    logits_processor: Sequence = (),
    stopping_criteria: Sequence = (),
    streamer=None,
    **model_kwargs,
):
    """For `model.generate(ids, custom_generate=slipstream.custom_generate, drafter=...)`.

    Keeps max_new_tokens, do_sample, temperature, top_k, top_p, num_return_sequences, eos_token_id,
    pad_token_id, attention_mask (of left-padded prompts), streamer and return_dict_in_generate.
    seed: of the first prompt, the next one's is one more; None draws one from torch's global
    generator. packed: on a CPU, reorder the model's weights for small batches where that is faster;
    in place, so that it can only decode from then on. Returns (B, T) prompts and answers, short
    ones padded, or transformers' output object with them. Raises `InputError` for all that it would
    not keep.
    """
    if not isinstance(drafter, Drafter):
        raise InputError(
            "drafter: give a Drafter to decode with, as Streaming(FOLDER), or the folder of a "
            "speculator as custom_generate=FOLDER"
        )
    config = generation_config
    _check_kept(config, [*logits_processor, *stopping_criteria], model_kwargs)
    streamer = _of_caller("streamer") if streamer is None else streamer
    callback = None
    if streamer is not None:
        if len(input_ids) > 1:
            raise InputError("streamer: it is told one answer at a time; give a single prompt")
        callback = lambda token, _, __: streamer.put(torch.tensor([token]))  # noqa: E731
    sampling = Sampling()
    if config.do_sample:
        temperature = 1.0 if config.temperature is None else config.temperature
        sampling = Sampling(temperature, config.top_k or None, config.top_p)
    end_ids = token_ids(config.eos_token_id)
    limits = Limits(config.max_length - input_ids.shape[1], end_ids=end_ids)
    target = target_of(model)
    if packed and target.device.type == "cpu" and not is_packed(model) and reordering_pays(model):
        pack_linears(model)
    engine = Engine(target, drafter.attached(target), sampling, limits, budget)
    prompts = _unpadded(input_ids, model_kwargs.get("attention_mask"))
    _check_positions(model_kwargs.get("position_ids"), [len(prompt) for prompt in prompts])
    seeds = _seeds(seed, len(prompts), config.do_sample)
    found = engine.generate_batch(prompts, seeds, [callback] * len(prompts))
    if streamer is not None:
        streamer.end()
    padding = config.pad_token_id
    if padding is None:  # as transformers has it; without any, answers end where the context does
        padding = int(torch.as_tensor(config.eos_token_id).flatten()[0]) if end_ids else 0
    answers = right_padded([each.ids for each in found], input_ids.device, value=padding)
    sequences = torch.cat([input_ids, answers.to(input_ids.dtype)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)


def generate_with_folder(
    model, inputs: torch.Tensor | None = None, streamer=None, generation_config=None, **options
):
    """For `model.generate(ids, custom_generate=FOLDER, trust_remote_code=True)`, where FOLDER is
    that of a speculator, or its hub id: its custom_generate/generate.py calls this.

    Where transformers opened the target from a folder that has this file in it (as `transformers
    serve` does), the speculator is looked for in the subfolder `speculator` of it. options: of
    `model.generate`, and budget, seed and packed of `custom_generate`, which says what is kept.
    """
    told = dict(options, streamer=streamer, generation_config=generation_config)
    if "custom_generate" in options:  # another one than that of the target's own folder
        return type(model).generate(model, inputs, **told)
    named = _of_caller("custom_generate")
    if not isinstance(named, str):
        named = Path(model.name_or_path) / BESIDE_TARGET
        if not named.is_dir():
            raise InputError(
                f"custom_generate: no speculator is in {named}; copy its folder there, or name it "
                "with custom_generate="
            )
    if options.get("stop_strings") or getattr(generation_config, "stop_strings", None):
        raise InputError("custom_generate: stop_strings is not supported; leave it out")
    # Kept by the target, so that both go together.
    known = vars(target_of(model)).setdefault("drafters_of_folders", {})
    key = str(named), times_of(locate(str(named)))
    drafter = known.get(key)
    if drafter is None:
        drafter = from_pretrained(str(named))
        known.clear()
        known[key] = drafter
    decoding = partial(custom_generate, drafter=drafter, streamer=streamer)
    return type(model).generate(model, inputs, custom_generate=decoding, **told)


def _check_kept(config, parts: Sequence, model_kwargs: dict) -> None:
    """`InputError` for a setting of `model.generate` that decoding here would not keep."""
    given = [name for name, value in model_kwargs.items() if value is not None]
    # also those of kinds that are kept, where the caller made them: they may say something else
    by_caller = [*(_of_caller("logits_processor") or ()), *(_of_caller("stopping_criteria") or ())]
    unkept = [type(part).__name__ for part in by_caller]
    unkept += [type(part).__name__ for part in parts if type(part).__name__ not in KEPT_BY_US]
    if _of_caller("assistant_model") is not None:
        unkept.append("assistant_model")
    unkept += [name for name in given if name not in NOT_NEEDED]
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        unkept.append("past_key_values")
    if config.get_generation_mode() not in MODES:
        unkept.append(config.get_generation_mode().value)
    if config.return_dict_in_generate:
        outputs = "scores", "logits", "attentions", "hidden_states"
        unkept += [f"output_{name}" for name in outputs if getattr(config, f"output_{name}")]
    if unkept:
        raise InputError(
            f"custom_generate: {unkept[0]} is not supported; leave out the generation setting it "
            "stands for (of the model's own generation config: pass its neutral value)"
        )


@checked
def _seeds(seed: Seed | None, count: int, sampled: bool) -> list[int]:
    """Of `count` prompts, one more for each."""
    if seed is None:
        seed = int(torch.randint(2**62, ())) if sampled else 0
    return list(range(seed, seed + count))


def _unpadded(ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """(B, T) ids without the padding before them, which the (B, T) mask, if any, hides."""
    if mask is None:
        return ids.tolist()
    hidden = mask == 0
    if (hidden[:, 1:] & ~hidden[:, :-1]).any():
        raise InputError("attention_mask: only tokens before the prompt may be hidden; pad left")
    starts = hidden.sum(1).tolist()
    return [own[start:] for own, start in zip(ids.tolist(), starts, strict=True)]


def _check_positions(positions: torch.Tensor | None, lengths: Sequence[int]) -> None:
    """`InputError` unless the prompts, of such lengths, have the positions 0, 1, 2 ...; those of
    the padding before them do not matter."""
    if positions is None:
        return
    for own, length in zip(positions.expand(len(lengths), -1).tolist(), lengths, strict=True):
        if own[len(own) - length :] != list(range(length)):
            raise InputError(
                "position_ids: a prompt's first token has position 0, the next 1 and so on; leave "
                "them out"
            )


def _of_caller(name: str):
    """What `model.generate` was given as `name` and does not hand on: a callable is not told its
    streamer, which has the prompt already and whose end somebody waits for; the file of a folder
    is not told which folder."""
    frame = inspect.currentframe()
    while frame is not None:
        called = frame.f_globals.get("__name__"), frame.f_code.co_name
        if called == ("transformers.generation.utils", "generate"):
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None
