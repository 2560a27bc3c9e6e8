"""Decoding as a plain Python call, and as transformers' `generate(custom_generate=...)`."""

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from slipstream.assets import locate
from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Generation, Limits
from slipstream.decoding.calibration import Calibrations, described
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.base import Drafter
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.methods import calibrated_decoder
from slipstream.targets.compiled import compile_target
from slipstream.targets.loading import fingerprint, load_target
from slipstream.targets.packed import is_packed
from slipstream.targets.target import Target, token_ids

Messages = list[dict[str, str]]
"""A conversation: `[{"role": "user", "content": "..."}]`."""
SMALL_TARGET, SMALL_SPECULATOR = "slipstream/small-target", "slipstream/small-streaming"
CALIBRATIONS = "runs/calibrations"
"""Where `infer.py calibrate=true` keeps what it found."""
CONF = Path(__file__).parents[2] / "conf"
"""Drafters have their names and settings here."""
# What transformers makes of the generation settings that our own sampling and limits cover.
KEPT_BY_US = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MaxLengthCriteria",
    "EosTokenCriteria",
)
# What transformers hands to every decoding method, and what decoding here has its own of.
NOT_NEEDED = (
    "attention_mask",
    "cache_position",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
)


def generate(
    prompt: str | Messages | Sequence[str | Messages],
    target: Target | torch.nn.Module | str | Path = SMALL_TARGET,
    drafter: Drafter | str | Path | None = SMALL_SPECULATOR,
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    budget: int | str = 10,
    on_text: Callable[[str], None] | None = None,
) -> Generation | list[Generation]:
    """Answer a prompt, or several together; the output is the target's own, only faster.

    prompt: a text, messages for the chat template, or a list of either, which has a list of
    answers. target: a `Target`, a transformers model, or the name or folder of one to load (kept
    for later calls). drafter: a `Drafter`, the folder of a streaming speculator, a name in
    conf/drafter, or None for plain decoding. budget: nodes of a draft tree, root included, or
    "auto" for what `infer.py calibrate=true` found. seed: of the first prompt, the next one's is
    one more. on_text: called with each piece of the text of a single answer as it is decided.
    Raises `InputError` for what cannot be used.
    """
    prompts = _prompts(prompt)
    if on_text is not None and prompts != [prompt]:
        raise InputError("on_text: it is told one answer at a time; give a single prompt")
    target = _with_tokenizer(target)
    sampling, limits = Sampling(temperature, top_k, top_p), Limits(max_new_tokens, stop)
    decoder = _decoder(target, _drafter(drafter, target), sampling, limits, budget)
    ids = [render_prompt(target.tokenizer, each) for each in prompts]
    if prompts == [prompt]:
        callback = None if on_text is None else (lambda _, __, text: text and on_text(text))
        return decoder.generate(ids[0], seed, callback)
    seeds = range(seed, seed + len(ids))
    if budget == "auto":  # which is calibrated for single prompts
        return [decoder.generate(own, number) for own, number in zip(ids, seeds, strict=True)]
    return decoder.generate_batch(ids, list(seeds))


def custom_generate(
    model,
    input_ids: torch.Tensor,
    generation_config=None,
    drafter: Drafter | None = None,
    budget: int = 10,
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
        raise InputError("input_ids: one prompt at a time; call generate for each of them")
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
    engine = Engine(_target_of(model), drafter, sampling, limits, budget)
    streamer = streamer or _streamer_of_caller()
    callback = streamer and (lambda token, _, __: streamer.put(torch.tensor([token])))
    seed = int(torch.randint(2**62, ())) if seed is None else seed
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
    unkept = [type(part).__name__ for part in parts if type(part).__name__ not in KEPT_BY_US]
    unkept += [
        name for name, value in model_kwargs.items() if value is not None and name not in NOT_NEEDED
    ]
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
    """`model.generate` keeps its streamer from a callable, but has put the prompt into it."""
    caller = inspect.currentframe().f_back.f_back
    return caller.f_locals.get("streamer") if caller.f_code.co_name == "generate" else None


def _prompts(prompt: object) -> list[str | Messages]:
    """One prompt, or several, as a list."""
    if _is_prompt(prompt):
        return [prompt]
    if isinstance(prompt, list | tuple) and prompt and all(map(_is_prompt, prompt)):
        return list(prompt)
    raise InputError(
        "prompt: give a text, messages with role and content, or a list of such prompts"
    )


def _is_prompt(prompt: object) -> bool:
    messages = isinstance(prompt, list | tuple) and prompt
    return isinstance(prompt, str) or bool(messages and all(isinstance(m, dict) for m in prompt))


def _decoder(
    target: Target, drafter: Drafter | None, sampling: Sampling, limits: Limits, budget: int | str
) -> Decoder:
    if drafter is None:
        return PlainDecoder(target, sampling, limits)
    description = _DESCRIBED.setdefault(drafter, described(drafter))
    if budget == "auto":
        kept = Calibrations(CALIBRATIONS)
        return calibrated_decoder(kept, target, drafter, description, sampling, limits)[1]
    if not isinstance(budget, int):
        raise InputError('budget: give a number of nodes, or "auto"')
    return Engine(target, drafter, sampling, limits, budget)


_DESCRIBED: WeakKeyDictionary[Drafter, object] = WeakKeyDictionary()
"""What drafters were like before they were used, by which calibrations are found."""


def _drafter(drafter: Drafter | str | Path | None, target: Target) -> Drafter | None:
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    if isinstance(drafter, str | Path):
        return _named_drafter(str(drafter), target)
    raise InputError(
        "drafter: give a Drafter, a speculator's folder, the name of a drafter, or None"
    )


@lru_cache(maxsize=1)
def _named_drafter(name: str, target: Target) -> Drafter:
    """One drafter for all calls with a target, so that what was made for it is made once."""
    names = sorted(path.stem for path in (CONF / "drafter").glob("*.yaml"))
    if name in names:
        return _configured(name, target)
    if not Path(locate(name)).is_dir():
        near = get_close_matches(name, names, n=1)
        raise InputError(
            f"drafter: {name!r} is neither a speculator's folder nor a drafter"
            + (f"; did you mean {near[0]!r}?" if near else f"; choose among {', '.join(names)}")
        )
    return Streaming(name, "auto", top_k=4)


def _configured(name: str, target: Target) -> Drafter:
    """What `infer.py drafter=NAME` drafts with."""
    from hydra import compose, initialize_config_dir

    from slipstream.configuration import build

    overrides = [
        f"drafter={name}",
        f"target.dtype={str(target.dtype).removeprefix('torch.')}",
        f"target.device={target.device.type}",
        f"target.packed={is_packed(target.model)}",
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return build(compose("infer", overrides).drafter)


def _with_tokenizer(target: Target | torch.nn.Module | str | Path) -> Target:
    """A target that can read text."""
    if isinstance(target, str | Path):
        return _loaded(str(target))
    if isinstance(target, torch.nn.Module) and hasattr(target, "config"):
        target = _target_of(target)
    if not isinstance(target, Target):
        raise InputError(
            "target: give a Target, a transformers model, or the name or folder of one"
        )
    if target.tokenizer is None:
        from transformers import AutoTokenizer

        name = target.model.name_or_path
        try:
            target.tokenizer = AutoTokenizer.from_pretrained(locate(name))
        except (OSError, ValueError) as error:
            raise InputError(
                f"target: no tokenizer is in {name!r}, from where the model came; give the model's "
                "folder, or Target(model, tokenizer)"
            ) from error
        target.fingerprint = fingerprint(target)
    return target


def _target_of(model: torch.nn.Module) -> Target:
    """The one `Target` of a transformers model, kept with it: what drafters have made for it
    (stores, merged layers) serves later calls, and its weights are fingerprinted once."""
    if "slipstream_target" not in vars(model):
        target = Target(model, name=model.name_or_path)
        target.fingerprint = fingerprint(target)
        model.slipstream_target = target
    return model.slipstream_target


@lru_cache(maxsize=1)
def _loaded(name: str) -> Target:
    return compile_target(load_target(name), "auto")
