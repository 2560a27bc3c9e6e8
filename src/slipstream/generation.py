"""Decoding as plain Python calls: whole answers, pieces of text as they are decided, a
conversation on the terminal."""

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock

import torch

from slipstream.assets import SHIPPED, locate
from slipstream.core.errors import InputError
from slipstream.core.files import times_of
from slipstream.core.sampling import Sampling
from slipstream.core.settings import Seed, checked, nearest
from slipstream.data.rendering import render_prompt
from slipstream.data.rows import Messages
from slipstream.decoding.answer import Generation, Limits
from slipstream.decoding.calibrated import calibrated_decoder
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.base import Drafter
from slipstream.speculators.checkpoint import from_pretrained
from slipstream.targets.compiled import compile_target
from slipstream.targets.fingerprints import tokenizer_digest
from slipstream.targets.loading import DTYPES, load_target, say_what_is_left_out, target_of
from slipstream.targets.packed import is_fused, is_packed
from slipstream.targets.target import Target

SMALL_TARGET, SMALL_SPECULATOR = "slipstream/small-target", "slipstream/small-streaming"
CALIBRATIONS = "runs/calibrations"
"""Where `infer.py calibrate=true` keeps what it found."""
_OPENING = RLock()
"""Threads open models one after the other, and each but once."""
_LOADED: dict[tuple, Target] = {}
"""The target that was named last."""
Named = str | Path | None
CONF = Path(__file__).parents[2] / "conf"
"""Drafters have their names and settings here."""


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
    budget: int | str = 12,
    on_text: Callable[[str], None] | None = None,
    speculator: str | Path | None = None,
    draft: str | Path | None = None,
) -> Generation | list[Generation]:
    """Answer a prompt, or several together; the output is the target's own, only faster.

    prompt: a text, messages for the chat template, or a list of either, which has a list of
    answers. target: a `Target`, a transformers model, or the name or folder of one to load (kept
    for later calls), in bfloat16 where it was saved in 16 bits. drafter: a `Drafter`, a
    speculator's folder or hub id, a name in conf/drafter ("auto" chooses at every step), or None
    for plain decoding. budget: nodes of a draft tree, root included, or "auto" for what
    `infer.py calibrate=true` found for the same model, device, dtype and drafter. seed: of the
    first prompt, the next one's is one more. on_text: called with each piece of the text of a
    single answer as it is decided. speculator, draft: folders of a speculator and of a draft model,
    with which those drafters of conf/drafter draft that need them, in place of the ones that ship.
    Raises `InputError` for what cannot be used.
    """
    alone = _is_prompt(prompt)
    asked = [prompt] if alone else prompt
    if not (isinstance(asked, list | tuple) and asked and all(map(_is_prompt, asked))):
        raise InputError(
            "prompt: give a text, messages with role and content, or a list of such prompts"
        )
    if on_text is not None and not alone:
        raise InputError("on_text: it is told one answer at a time; give a single prompt")
    how = Sampling(temperature, top_k, top_p), Limits(max_new_tokens, stop)
    decoder = _decoder(target, drafter, *how, seed, budget, speculator, draft)
    ids = [render_prompt(decoder.target.tokenizer, each) for each in asked]
    if alone:
        callback = None if on_text is None else (lambda _, __, text: text and on_text(text))
        return decoder.generate(ids[0], seed, callback)
    seeds = range(seed, seed + len(ids))
    if budget == "auto":  # which is calibrated for single prompts
        return [decoder.generate(own, number) for own, number in zip(ids, seeds, strict=True)]
    return decoder.generate_batch(ids, list(seeds))


def stream(
    prompt: str | Messages,
    target: Target | torch.nn.Module | str | Path = SMALL_TARGET,
    drafter: Drafter | str | Path | None = SMALL_SPECULATOR,
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    budget: int | str = 12,
    speculator: str | Path | None = None,
    draft: str | Path | None = None,
) -> Generator[str, None, Generation]:
    """Answer one prompt as `generate` does: an iterator over pieces of the text, each as soon as
    it is decided. Closing it, or leaving it, ends the work. Its return value is the `Generation`.
    The call reads the prompt, and raises `InputError` before the first piece."""
    if not _is_prompt(prompt):
        raise InputError("prompt: give one text, or messages with role and content")
    how = Sampling(temperature, top_k, top_p), Limits(max_new_tokens, stop)
    decoder = _decoder(target, drafter, *how, seed, budget, speculator, draft)
    pieces: list[str] = []
    ids = render_prompt(decoder.target.tokenizer, prompt)
    request = decoder.request(ids, seed, lambda _, __, text: pieces.append(text))
    decoder.start([request])

    def steps() -> Generator[str, None, Generation]:
        while True:
            text = "".join(pieces)
            pieces.clear()
            if text:
                yield text
            if request.finished:
                return request.generation()
            decoder.step()

    return steps()


def chat(
    target: Target | torch.nn.Module | str | Path = SMALL_TARGET,
    drafter: Drafter | str | Path | None = SMALL_SPECULATOR,
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    budget: int | str = 12,
    speculator: str | Path | None = None,
    draft: str | Path | None = None,
) -> None:
    """Talk with the target on the terminal, the words as `generate` has them; drafted tokens green,
    the target's own yellow. It ends with an empty line, "exit" or Ctrl-D."""
    from slipstream.evaluation.run import converse

    how = Sampling(temperature, top_k, top_p), Limits(max_new_tokens, stop)
    converse(_decoder(target, drafter, *how, seed, budget, speculator, draft), seed)


def _is_prompt(prompt: object) -> bool:
    """Whether it is one prompt: a text, or messages."""
    if isinstance(prompt, list) and prompt:
        return all(isinstance(message, dict) for message in prompt)
    return isinstance(prompt, str)


@checked
def _decoder(
    target, drafter, sampling, limits, seed: Seed, budget, speculator: Named, draft: Named
) -> Decoder:
    """With the settings of `generate`; the seed is looked at alone."""
    with _OPENING:
        target = _with_tokenizer(target)
        drafter = _drafter(drafter, target, speculator, draft)
        attached = drafter and drafter.attached(target)
    if attached is None:
        return PlainDecoder(target, sampling, limits)
    if budget == "auto":
        return calibrated_decoder(CALIBRATIONS, target, drafter, attached, sampling, limits)[1]
    if not isinstance(budget, int):
        raise InputError('budget: give a number of nodes, or "auto"')
    return Engine(target, attached, sampling, limits, budget)


def _drafter(drafter: Drafter | Named, target: Target, *parts: Named) -> Drafter | None:
    """What is named or given; parts: the speculator and the draft model for one that is named."""
    if any(parts) and str(drafter) not in _names():
        raise InputError(
            'speculator, draft: they are for a drafter of conf/drafter, as drafter="streaming"; '
            "name one, or leave them out"
        )
    if isinstance(drafter, str | Path):
        # Kept by the target, so that both go together.
        known = vars(target).setdefault("named_drafter", {})
        return _last(known, lambda *names: _named_drafter(target, *names), drafter, *parts)
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    raise InputError("drafter: give a Drafter, a speculator's folder, a drafter's name, or None")


def _last(known: dict[tuple, object], make: Callable[..., object], *names: Named) -> object:
    """The entry of `known` for these names, if their folders have not changed since; else a new
    one, made after `known` is emptied: two large models may not fit."""
    names = [name and str(name) for name in names]
    key = tuple(name and (name, times_of(locate(name))) for name in names)
    if key not in known:
        known.clear()
        gc.collect()
        torch.cuda.empty_cache()
        known[key] = make(*names)
    return known[key]


def _names() -> list[str]:
    """The drafters of conf/drafter."""
    return sorted(path.stem for path in (CONF / "drafter").glob("*.yaml"))


def _named_drafter(target: Target, name: str, *parts: str | None) -> Drafter:
    if name in (names := _names()):
        return _configured(target, name, *parts)
    if not Path(locate(name)).is_dir() and name.count("/") != 1:  # which may be a hub id
        unknown = "names of drafters are known in a source checkout alone"
        hint = nearest(name, names) if names else unknown
        raise InputError(
            f"drafter: {name!r} is neither a speculator's folder nor a drafter; {hint}"
        )
    return from_pretrained(name)


def _configured(target: Target, name: str, speculator: str | None, draft: str | None) -> Drafter:
    """What `infer.py drafter=NAME` drafts with."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from slipstream.commands import Infer
    from slipstream.configuration import build, check_config

    overrides = [
        f"drafter={name}",
        f"target.device={target.device}",
        f"target.packed={is_packed(target.model) or is_fused(target.model)}",
    ]
    overrides += [f"target.dtype={each}" for each in DTYPES if DTYPES[each] is target.dtype]
    hydra, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # a caller's own
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("infer", overrides)
    finally:
        GlobalHydra.instance().hydra = hydra
    read = str(OmegaConf.to_container(config.drafter, resolve=False))
    for own, given, key in ("speculator", speculator, "speculator_path"), ("draft", draft, "draft"):
        if given and f"${{{key}}}" not in read:
            raise InputError(f"{own}: drafter={name!r} drafts without one; leave it out")
    config.speculator_path = speculator or config.speculator_path
    config.draft = draft or config.draft
    check_config(config, Infer)
    return build(config.drafter)


def _opened(name: str) -> Target:
    """The target called `name`; in bfloat16, as target=hub has it, where it was saved in 16 bits,
    but for those that ship: in float32."""
    from transformers import PreTrainedConfig

    said = {}
    if name not in SHIPPED:
        with suppress(Exception):  # `load_target` says what is wrong
            said, _ = PreTrainedConfig.get_config_dict(name)
    saved = str(said.get("dtype") or said.get("torch_dtype"))
    dtype = "bfloat16" if saved in ("bfloat16", "float16") else "float32"
    return compile_target(load_target(name, dtype), "auto")


def _with_tokenizer(target: Target | torch.nn.Module | str | Path) -> Target:
    """A target that can read text."""
    if isinstance(target, str | Path):
        return _last(_LOADED, _opened, target)
    if isinstance(target, torch.nn.Module) and hasattr(target, "config"):
        target = target_of(target)  # not compiled: its adapters may change, which graphs do not see
    elif not isinstance(target, Target):
        raise InputError(
            "target: give a Target, a transformers model, or the name or folder of one"
        )
    elif target.compile_mode is None:
        compile_target(target, "auto")
    if target.tokenizer is None:  # the first time
        say_what_is_left_out(target.model, target.name)
        from transformers import AutoTokenizer

        name = target.model.name_or_path
        try:
            target.tokenizer = AutoTokenizer.from_pretrained(locate(name), trust_remote_code=False)
        except Exception as error:  # of what others wrote, anything can be wrong
            raise InputError(
                f"target: no tokenizer is in {name!r}, from where the model came; give the model's "
                "folder, or Target(model, tokenizer)"
            ) from error
        target.fingerprint |= {"tokenizer": tokenizer_digest(target)}
    return target
