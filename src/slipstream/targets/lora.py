"""LoRA on a target, through PEFT: for fine-tuning it, alone or together with streams.

The target itself is never changed, and its weights are shared (unless they were packed for
decoding): training costs no memory beyond the adapters.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from slipstream.core.errors import InputError
from slipstream.core.settings import Amount, Below1, Settings, Size, Text
from slipstream.targets.packed import fuse_linears, pack_linears, unpack_linears
from slipstream.targets.quantized import is_quantized, tensors_of
from slipstream.targets.target import Target


@dataclass(frozen=True)
class LoraSettings(Settings):
    """rank, alpha, dropout: LoRA's own (the update is alpha / rank * B A). modules: names of
    linears inside a layer, None for all of the family's; layers: their indices, None for all."""

    section = "lora"
    rank: Size = 8
    alpha: float = 16.0
    dropout: Below1 = 0.0
    modules: Sequence[Text] | None = None
    layers: Sequence[Amount] | None = None


def with_lora(target: Target, settings: LoraSettings) -> tuple[Target, dict[str, nn.Parameter]]:
    """A target that shares `target`'s weights and carries new LoRA layers (B zero at first).

    Returns it and its trainable tensors by name. Raises `InputError` for modules or layers that
    `target` has not.
    """
    from peft import LoraConfig, inject_adapter_in_model

    family = target.family
    linears = family.attention_linears + family.mlp_linears
    modules, known = list(settings.modules or linears), range(target.num_layers)
    layers = list(known if settings.layers is None else settings.layers)
    for name in modules:
        if name not in linears:
            raise InputError(
                f"lora.modules: {name!r} is no linear of this architecture; choose among "
                f"{', '.join(linears)}"
            )
    if not set(layers) <= set(known):
        raise InputError(f"lora.layers: must be within 0..{target.num_layers - 1}")
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=modules,
        layers_to_transform=layers,
        fan_in_fan_out=any(hasattr(module, "nx") for module in family.layers.modules()),
    )
    model = _sharing_copy(target.model)
    unpack_linears(model)
    inject_adapter_in_model(config, model)
    trained = {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
    for parameter in trained.values():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        parameter.requires_grad_(True)
    return _target_like(target, model), trained


def merge(target: Target, packed: bool, fused: bool = False) -> Target:
    """A copy of an adapted target with the adapters folded into its weights (quantised weights keep
    them beside); for decoding only.

    packed: reorder the weights for small batches, as `load_target` does on a CPU; fused: make one
    product of those that read the same, as it does on a GPU.
    """
    from peft.tuners.lora import LoraLayer

    changed = _folded_tensors(target.model)
    model = _sharing_copy(target.model, changed)
    for name, module in list(model.named_modules()):
        if changed and isinstance(module, LoraLayer):
            module.merge(safe_merge=True)
            model.set_submodule(name, module.get_base_layer())
    model.eval().requires_grad_(False)
    if packed:
        pack_linears(model)
    merged = _target_like(target, model)
    if fused:
        fuse_linears(merged.family.layers, merged.family.fused)
    return merged


def save_lora(folder: Path, target: Target) -> None:
    """Write the LoRA layers of an adapted target as PEFT's own adapter folder."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(target.model)
    target.model.peft_config["default"].save_pretrained(str(folder))
    safetensors.torch.save_file(
        {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()},
        folder / "adapter_model.safetensors",
    )


def _target_like(target: Target, model: nn.Module) -> Target:
    adapted = Target(model, target.tokenizer, target.name)
    adapted.fingerprint, adapted.loading = target.fingerprint, target.loading
    return adapted


def merged_bytes(target: Target) -> int:
    """What `merge` adds to an adapted target, if nothing is packed."""
    return sum(tensor.nbytes for tensor in _folded_tensors(target.model))


def _folded_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The adapters, and the weights that they are folded into; none where these are quantised."""
    from peft.tuners.lora import LoraLayer

    if is_quantized(model):
        return []
    adapted = (module for module in model.modules() if isinstance(module, LoraLayer))
    return [tensor for module in adapted for tensor in module.parameters()]


def _sharing_copy(model: nn.Module, changed: Sequence[torch.Tensor] = ()) -> nn.Module:
    """New modules around the same parameters and buffers, but for those in `changed`."""
    own = set(map(id, changed))
    same = {id(tensor): tensor for tensor in tensors_of(model) if id(tensor) not in own}
    return copy.deepcopy(model, same)
