"""Loading targets: from the shipped assets, a local folder or the Hugging Face hub; and checks."""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import nn

from slipstream.assets import locate
from slipstream.core.errors import (
    LANGUAGE_MODEL,
    InputError,
    enough_memory,
    first_sentence,
    out_of_memory,
    what_is,
)
from slipstream.core.files import check_intact
from slipstream.core.settings import Text, checked
from slipstream.core.templates import FIELD, check_arguments, template_of
from slipstream.targets import quantized
from slipstream.targets.families import FAMILIES, check_architecture, family_of
from slipstream.targets.fingerprints import fingerprint
from slipstream.targets.packed import fuse_linears, pack_linears, reordering_pays
from slipstream.targets.target import Target, beyond_weights

log = logging.getLogger(__name__)
MOST_LAYERS = 1000
"""Several times as many as any model has; a config that names a million would fill the memory."""
LEFT_OUT = {
    **dict.fromkeys(["repetition_penalty", "encoder_repetition_penalty", "guidance_scale"], 1.0),
    **dict.fromkeys(["num_beams", "typical_p"], 1),
    **dict.fromkeys(["no_repeat_ngram_size", "min_length", "min_new_tokens", "min_p"], 0),
    **dict.fromkeys(["encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"], 0),
    **dict.fromkeys("bad_words_ids sequence_bias suppress_tokens forced_eos_token_id".split()),
    **dict.fromkeys("begin_suppress_tokens exponential_decay_length_penalty stop_strings".split()),
    **dict.fromkeys("watermarking_config max_time penalty_alpha top_h forced_bos_token_id".split()),
}
"""What a model's own generation config may ask for besides, and what would change nothing."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@enough_memory(
    "target", "give target.quantization=int8 or nf4, target.device_map=auto, or target.device=cpu"
)
@checked
def load_target(
    name: Text,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    device: Text = "auto",
    packed: bool = True,
    adapter: Text | None = None,
    quantization: Literal[quantized.QUANTIZATIONS] | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: dict | None = None,
    architecture: dict | None = None,
    device_map: Text | dict | None = None,
    tensor_parallel: bool = False,
    reads_markers: bool = False,
) -> Target:
    """Open the model and tokenizer called `name`: a shipped model, a folder, or a hub id.

    device: 'auto' takes CUDA if there is any. packed: lay the weights out for decoding, on a CPU
    reordered where that is faster, on a GPU fused (see targets/packed.py). adapter: a PEFT adapter
    (folder or hub id) to merge into the weights, or to run beside quantised ones. quantization:
    'int8' or 'nf4' (bitsandbytes). chat_template: in place of the tokenizer's, or a file with it;
    chat_template_kwargs: what it is told, as in {"enable_thinking": False}. architecture: what the
    model's config must say. device_map: accelerate's, to spread the layers over devices ('auto', or
    a device for each module); in place of `device`. tensor_parallel: split every layer over the
    processes that torchrun started, by transformers' own plan. reads_markers: take special tokens
    that are spelled in texts for those tokens, as in prompts rendered before. No code of a model's
    folder is run. Raises `InputError` for what cannot be opened, pickles of more than tensors, too.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

    device, location, told = _available(device), locate(name), dict(chat_template_kwargs or {})
    check_arguments(told, f"target.{FIELD}")
    chat_template = template_of(chat_template)
    try:
        check_intact(location)
        said = _config(location)
        already = quantized.kind_in(said)
    except Exception as error:  # of what others wrote, anything can be wrong
        raise _no_model(name, error) from error
    kind = said.get("model_type")
    if kind in CONFIG_MAPPING:  # others are no models
        check_architecture(kind)
    if already and quantization not in (None, already):
        raise InputError(
            f"target.quantization: {name!r} is quantised already, to {already}; set it to null"
        )
    placed = bool(device_map or quantization or already or tensor_parallel)
    options = {"dtype": DTYPES[dtype] if placed else "auto"}  # cast and placed while it is loaded
    if kind in FAMILIES:  # whatever its config asks for
        options["attn_implementation"] = FAMILIES[kind].attention
    if tensor_parallel:
        options |= _tensor_parallel_options(device_map, quantization or already)
    elif placed:
        options["device_map"] = device_map or {"": device}
    if quantization is not None and not already:
        options["quantization_config"] = quantized.settings(quantization, DTYPES[dtype])
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=False)
        model, found = AutoModelForCausalLM.from_pretrained(
            location, output_loading_info=True, trust_remote_code=False, **options
        )
        tokenizer.reads_markers, tokenizer.chat_template_kwargs = reads_markers, told
    except Exception as error:  # as above
        if out_of_memory(error):
            raise
        raise _no_model(name, error) from error
    _check_content(model, found["missing_keys"], architecture or {}, name)
    say_what_is_left_out(model, name)
    if chat_template is not None:
        tokenizer.own_template = chat_template != tokenizer.chat_template
        tokenizer.chat_template = chat_template
    quantized.settle(model, DTYPES[dtype], reorder=packed and dtype == "bfloat16")
    if adapter is not None:
        model = _adapted(model, adapter, dtype)
    target = Target(model.eval().requires_grad_(False), tokenizer, name)
    target.fingerprint = fingerprint(target)
    target.loading = dict(adapter=adapter, quantization=quantization, device_map=device_map)
    if not quantized.is_quantized(model):
        for parameter in model.parameters():  # not the buffers: rotary frequencies stay float32
            parameter.data = parameter.data.to(DTYPES[dtype])
        if hasattr(embeddings := model.get_input_embeddings(), "scalar_embed_scale"):  # Gemma's
            scale = torch.tensor(embeddings.scalar_embed_scale, dtype=DTYPES[dtype])
            embeddings.embed_scale = scale.to(embeddings.embed_scale.device)
        if not placed:
            model.to(device)
    whole_on_cpu = target.device.type == "cpu" and (not placed or quantization or already)
    if packed and whole_on_cpu and reordering_pays(model):
        pack_linears(model)
    if packed and target.device.type == "cuda" and not placed:
        fuse_linears(target.family.layers, target.family.fused)
    return target


def say_what_is_left_out(model: nn.Module, name: str) -> None:
    """Warn of what the model's own generation config asks for, and nothing here does."""
    for setting, neutral in LEFT_OUT.items():
        asked = getattr(model.generation_config, setting, None)
        if asked is not None and asked != neutral:
            log.warning("%s asks for %s=%s, which is left out", name, setting, asked)


def _available(device: str) -> str:
    """The device, 'auto' resolved; `InputError` where there is none."""
    if device == "auto":
        device = "cpu"
        if torch.cuda.is_available():  # each process that a launcher started has one of its own
            device = f"cuda:{os.environ.get('LOCAL_RANK') or torch.cuda.current_device()}"
    try:
        found = torch.empty(0, device=device).device  # 'cuda' is the first of them
        if found.type == "cuda":  # streams and graphs take the current device
            torch.cuda.set_device(found)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"target.device: {device!r} is not available here; try 'cpu'") from error
    return str(found)


def _tensor_parallel_options(device_map, quantization) -> dict[str, object]:
    """What `from_pretrained` takes for its own tensor-parallel plan."""
    if device_map is not None or quantization is not None:
        raise InputError(
            "target.tensor_parallel: goes with neither target.device_map nor target.quantization; "
            "set them to null"
        )
    if "WORLD_SIZE" not in os.environ:
        raise InputError(
            "target.tensor_parallel: needs several processes; start with "
            "torchrun --nproc-per-node=N infer.py ..."
        )
    try:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    except (ImportError, TypeError):  # before 5.18
        return {"tp_plan": "auto"}


def _no_model(name: str, error: Exception) -> InputError:
    seen = what_is(locate(name))
    if seen in ("", LANGUAGE_MODEL):
        seen = f"cannot be opened ({first_sentence(error)})"
    else:
        seen = f"is {seen}"
    return InputError(
        f"target.name: {name!r} {seen}; give a model folder, a hub id, or slipstream/small-target"
    )


def _config(location: str) -> dict:
    """What config.json says; ValueError where it names code of the hub, no kind of model, or an
    absurd number of layers."""
    from transformers import PreTrainedConfig

    said, _ = PreTrainedConfig.get_config_dict(location)
    if isinstance(said.get("model_type"), list | dict):
        raise ValueError("its config.json names no kind of model")
    for name, value in said.items():
        if "attn_implementation" in name and "/" in str(value):  # kernels: code of the hub
            raise ValueError(f"its config.json names code to attend with, {value}")
        if name in ("num_hidden_layers", "n_layer", "num_layers") and not (
            isinstance(value, int) and 0 < value <= MOST_LAYERS
        ):
            raise ValueError(f"its config.json has {name} {str(value)[:20]}")
    return said


def _check_content(model: nn.Module, missing: set[str], architecture: dict, name: str) -> None:
    if missing:  # transformers gives these random values
        raise InputError(
            f"target.name: {name!r} lacks {len(missing)} tensors, such as {min(missing)!r}; copy "
            "or download its files again"
        )
    for key, expected in architecture.items():
        found = getattr(model.config, key, None)
        if found != expected:
            raise InputError(
                f"target.architecture: {key} is {expected} here and {found} in {name}; mend it, or "
                "set target.architecture=null"
            )


def _adapted(model: nn.Module, adapter: str, dtype: str) -> nn.Module:
    """`model` with a PEFT adapter folded into its weights in float32, whole unless `dtype` is
    bfloat16, then layer by layer; quantised weights stay, and the adapter runs beside them."""
    from peft import PeftModel

    beside, by_layer = quantized.is_quantized(model), dtype == "bfloat16"
    try:
        check_intact(adapter)
        whole = model if beside or by_layer else model.float()
        adapted = PeftModel.from_pretrained(whole, adapter)
        if unkept := beyond_weights(adapted):
            raise ValueError(f"it is {unkept}")
        for module in adapted.modules() if by_layer else ():
            if hasattr(module, "merge") and hasattr(module, "base_layer"):
                module.merge = partial(_merge_in_float32, module, module.merge)
        return adapted.get_base_model() if beside else adapted.merge_and_unload(safe_merge=True)
    except Exception as error:  # as above
        raise InputError(
            f"target.adapter: {adapter!r} cannot be merged into this target "
            f"({first_sentence(error)}); give the folder of an adapter that was trained on it, or "
            "null"
        ) from error


def _merge_in_float32(module: nn.Module, merge: Callable, *given, **options) -> None:
    """`merge` an adapter into the weights of `module`, and make these bfloat16."""
    weights = module.get_base_layer().float()
    merge(*given, **options)
    weights.bfloat16()


def target_of(model: nn.Module) -> Target:
    """The one `Target` of a transformers model, kept with it: what drafters have made for it
    (stores, merged layers) serves later calls, and its weights are fingerprinted once. A model
    that was moved, cast, resized or given other embeddings, layers or another kind of adapter since
    is another one."""
    model = model._modules.get("_orig_mod", model)  # of `torch.compile`
    family, adapter = family_of(model), beyond_weights(model)
    if any(module.training and _drops_out(module) for module in family.decoder.modules()):
        raise InputError("target: it is in train mode and would drop out; call model.eval()")
    parts = family.embeddings, *family.layers
    state = model.device, model.dtype, model.config.vocab_size, adapter, parts
    known, target = vars(model).get("slipstream_target", (None, None))
    if known != state:
        quantized.check_exact(model)
        target = Target(model, name=model.name_or_path)
        target.fingerprint = fingerprint(target)
        model.slipstream_target = state, target
    return target


def _drops_out(module: nn.Module) -> bool:
    """Whether a module leaves something to chance in train mode; some layers keep their rates."""
    names = ("p",) if isinstance(module, nn.Dropout) else ("attention_dropout", "dropout")
    rates = [getattr(module, name, None) for name in names]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def of_same_vocabulary(draft: Target, target: Target, field: str) -> Target:
    """The draft model of config `field`, with as many logits as the target has: their vocabularies
    may be padded differently. `InputError` if its tokens are others; by their number alone where
    one of them came without a tokenizer."""
    if target.tokenizer is None or draft.tokenizer is None:
        same = target.vocab_size == draft.vocab_size
    else:
        same = target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()
    if not same:
        raise InputError(
            f"{field}: {draft.name or 'the draft model'} has another vocabulary than the target; "
            "choose a draft model with the target's tokenizer (draft=...)"
        )
    return draft.of_vocabulary(target.vocab_size)
