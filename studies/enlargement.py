"""The same function in a larger Llama: acceptance of the small model, cost of the large one.

New dimensions of the hidden state are always zero, new heads and new units of an MLP are not read,
and new layers, below the old ones, add nothing. All of them are computed all the same.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from slipstream.core.errors import InputError
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.target import Target

UNREAD = 0.02
"""Size of the random weights whose results nothing reads."""


@dataclass(frozen=True)
class LargeShape:
    """Sizes of the large model; its heads have keys of their own, and are as wide as before."""

    hidden: int
    intermediate: int
    layers: int
    heads: int


def enlarged_target(target: Target, shape: LargeShape, dtype: torch.dtype) -> Target:
    """A Llama of `shape` on the target's device that computes what `target` does, rounding apart.

    Raises `InputError` for a target that is no Llama, or larger than `shape`.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    old = target.model.config
    if old.model_type != "llama":
        raise InputError("target: only a Llama can be enlarged; take slipstream/small-target")
    sizes = old.hidden_size, old.intermediate_size, target.num_layers, old.num_attention_heads
    if any(
        a > b
        for a, b in zip(
            sizes, (shape.hidden, shape.intermediate, shape.layers, shape.heads), strict=True
        )
    ):
        raise InputError(f"study.shape: must not be smaller than the target, which has {sizes}")
    content = old.to_dict() | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "rms_norm_eps": old.rms_norm_eps * old.hidden_size / shape.hidden,
    }
    with torch.device(target.device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**content), dtype=dtype)
    large = Target(model.eval().requires_grad_(False), target.tokenizer, target.name)
    scale = _norm_scale(target, large)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=UNREAD)
        model.generation_config = target.model.generation_config
        _place(large.family.decoder.embed_tokens, target.family.decoder.embed_tokens)
        _place(large.head, target.head)
        _place_norm(large.family.decoder.norm, target.family.decoder.norm, scale)
        for layer in large.family.layers:
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                layer.get_submodule(name).weight.zero_()
        groups = old.num_attention_heads // target.family.cache_shape[0]
        for ours, theirs in zip(_same_layers(target, large), target.family.layers, strict=True):
            for name in target.family.attention_linears + target.family.mlp_linears:
                weight = theirs.get_submodule(name).weight
                if name in ("self_attn.k_proj", "self_attn.v_proj"):
                    weight = _own_heads(weight, groups, target.family.cache_shape[1])
                _fill(ours.get_submodule(name).weight, weight)
            for name in ("input_layernorm", "post_attention_layernorm"):
                _place_norm(ours.get_submodule(name), theirs.get_submodule(name), scale)
    return large


def enlarged_speculator(
    speculator: StreamingSpeculator, target: Target, large: Target
) -> StreamingSpeculator:
    """The speculator of `large`, made from that of `target`: it drafts the same.

    Raises `InputError` for shared mode.
    """
    config = speculator.config
    if config.mode == "shared":
        raise InputError("study.speculator: only lossless streams can be enlarged; take such ones")
    offset = large.num_layers - target.num_layers
    if config.pruning_layer is not None:
        config = replace(config, pruning_layer=config.pruning_layer + offset)
    found = StreamingSpeculator(large, config)
    scale, size = _norm_scale(target, large), target.family.cache_shape[1]
    groups = target.model.config.num_attention_heads // target.family.cache_shape[0]
    state = found.state_dict()
    for name, tensor in speculator.state_dict().items():
        parts = name.split(".")
        if parts[0] == "adapters":
            parts[2] = str(int(parts[2]) + offset)
            if parts[3] in ("self_attn/k_proj", "self_attn/v_proj") and parts[4] == "up":
                tensor = _own_heads(tensor, groups, size)
        elif parts[0] in ("transitions", "copying") or name == "root.down":
            # they read token embeddings at unit size, which have more dimensions now
            tensor = tensor * scale if name != "copying.stream" else tensor
        place = state[".".join(parts)].zero_()
        place[tuple(slice(length) for length in tensor.shape)] = tensor
    found.load_state_dict(state)
    return found.to(large.device, large.dtype).eval()


def _norm_scale(target: Target, large: Target) -> float:
    """What norms over more dimensions, the new ones zero, are too large by, inverted."""
    return (target.hidden_size / large.hidden_size) ** 0.5


def _same_layers(target: Target, large: Target) -> nn.ModuleList:
    return large.family.layers[large.num_layers - target.num_layers :]


def _own_heads(weight: torch.Tensor, groups: int, size: int) -> torch.Tensor:
    """(H_kv * size, ...) -> (H * size, ...): each query head its own copy."""
    return weight.unflatten(0, (-1, size)).repeat_interleave(groups, 0).flatten(0, 1)


def _fill(large: torch.Tensor, small: torch.Tensor) -> None:
    large[tuple(slice(length) for length in small.shape)] = small.to(large)


def _place(large: nn.Module, small: nn.Module) -> None:
    large.weight.zero_()
    _fill(large.weight, small.weight)


def _place_norm(large: nn.Module, small: nn.Module, scale: float) -> None:
    _fill(large.weight, small.weight * scale)
