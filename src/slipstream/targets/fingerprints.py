"""Fingerprints, which tell whether a speculator fits a target: digests of its parts."""

import hashlib
import json
import re

import torch

from slipstream.core.errors import InputError
from slipstream.core.templates import FIELD
from slipstream.targets import quantized
from slipstream.targets.target import Target

VOLATILE = re.compile(
    "_name_or_path|dtype|torch_dtype|transformers_version|use_cache|quantization_config"
    "|architectures|pretraining_tp|.*_token_id|.*dropout|.*pdrop|layerdrop|init_.*|initializer_.*"
    "|output_.*|return_dict.*|summary_.*"
)
"""What a model's config says that makes it no other model: what scripts set beside it, and what
training alone reads."""
SMALLEST = 2.0**-14
"""Weights below it do not count: float16 rounds them otherwise."""


def tokenizer_digest(target: Target) -> str:
    """SHA-256 of the vocabulary, the chat template and what this is told: the tokenizer's part of a
    fingerprint."""
    vocabulary = {} if target.tokenizer is None else target.tokenizer.get_vocab()
    found = {"vocabulary": sorted(vocabulary.items(), key=lambda entry: entry[1])}
    found["chat_template"] = getattr(target.tokenizer, "chat_template", None)
    told = getattr(target.tokenizer, FIELD, None)
    return _digest(found | ({FIELD: told} if told else {}))


def fingerprint(target: Target) -> dict[str, str]:
    """SHA-256 digests of a target's config, tokenizer and weights, and how it is quantised, if so.

    Of each weight tensor its name, shape and up to 4,096 evenly spaced values count, rounded to
    bfloat16, so that the dtype it was saved in makes no difference, nor, for weights that bfloat16
    has, the one it was opened in. `load_target` takes it before it casts. Of quantised weights
    their scales count. Raises `InputError` for weights that are not all finite.
    """
    said = target.model.config.to_diff_dict()
    told = {key: value for key, value in said.items() if value is not None}
    config = {key: value for key, value in told.items() if not VOLATILE.fullmatch(key)}
    weights = hashlib.sha256()
    for name, tensor in sorted(_state(target.model).items()):
        if not tensor.is_floating_point():
            continue
        if hasattr(tensor, "full_tensor"):  # split over processes
            tensor = tensor.full_tensor()
        flat = tensor.detach().flatten()
        # One pass without a copy (but of float8, which has no minimum), ten times as fast as
        # `isfinite` of all: NaN wins both.
        values = flat.float() if flat.element_size() == 1 else flat
        if len(values) and not torch.stack(values.aminmax()).isfinite().all():
            raise InputError(
                f"target.name: {target.name!r} has NaN or infinity in its weights, in {name!r}; "
                "copy or download its files again"
            )
        sample = flat[:: max(1, -(-len(flat) // 4096))].to(torch.bfloat16).cpu()
        sample = sample.masked_fill(sample.abs() < SMALLEST, 0.0)
        weights.update(f"{name}{tuple(tensor.shape)}".encode())
        weights.update(sample.view(torch.int16).numpy().tobytes())
    parts = {"config": _digest(config), "tokenizer": tokenizer_digest(target)}
    parts |= {"weights": weights.hexdigest(), "quantization": quantized.kind_of(target.model)}
    return {name: part for name, part in parts.items() if part is not None}


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All tensors, those that lie on a disk included; `InputError` where some lie nowhere."""
    quantized.reordered_back(model)
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model.state_dict()
    if not any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise InputError("target: weights of it are on the meta device; load it with its weights")
    from accelerate.utils.modeling import get_state_dict_offloaded_model

    return get_state_dict_offloaded_model(model)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
