"""The same function in a larger Llama: acceptance of the small model, cost of the large one.

New dimensions of the hidden state are always zero, new heads and new units of an MLP are not read,
and new layers, below the old ones, add nothing. All of them are computed all the same.
"""

from dataclasses import asdict, dataclass, replace

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from slipstream.core.errors import InputError
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from studies import Target

# Size of the random weights whose results nothing reads, and the matrices that are zero instead.
UNREAD, READ = 0.02, ("embed_tokens", "lm_head", "o_proj", "down_proj")
# Weights of speculators that read token embeddings at unit size, which have more dimensions now.
SCALED = "root.down", "copying.parent", "copying.child"


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
    old = target.model.config
    if old.model_type != "llama":
        raise InputError("target: only a Llama can be enlarged; take slipstream/small-target")
    sizes = old.hidden_size, old.intermediate_size, target.num_layers, old.num_attention_heads
    if any(small > large for small, large in zip(sizes, asdict(shape).values(), strict=True)):
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
    model.generation_config = target.model.generation_config
    large = Target(model.eval().requires_grad_(False), target.tokenizer, target.name)
    places = model.state_dict()
    for name, place in places.items():
        place.normal_(std=UNREAD)
        if any(matrix in name for matrix in READ):
            place.zero_()
    for name, tensor in target.model.state_dict().items():
        if "norm" in name:
            tensor = tensor * _norm_scale(target, large)
        _fill(places[_moved(name, target, large)], _own_heads(name, tensor, target))
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
    if config.pruning_layer is not None:
        layer = config.pruning_layer + large.num_layers - target.num_layers
        config = replace(config, pruning_layer=layer)
    found = StreamingSpeculator(large, config)
    state = found.state_dict()
    for name, tensor in speculator.state_dict().items():
        part = name.split(".")[0]
        if part == "adapters":
            name = _moved(name, target, large)
            tensor = _own_heads(name, tensor, target) if ".up" in name else tensor
        elif part == "transitions" or name in SCALED:
            tensor = tensor * _norm_scale(target, large)
        _fill(state[name].zero_(), tensor)
    found.load_state_dict(state)
    return found.to(large.device, large.dtype).eval()


def _norm_scale(target: Target, large: Target) -> float:
    """What norms over more dimensions, the new ones zero, are too large by, inverted."""
    return (target.hidden_size / large.hidden_size) ** 0.5


def _moved(name: str, target: Target, large: Target) -> str:
    """A tensor's name in `large`, where the old layers come last."""
    parts = name.split(".")
    if len(parts) > 2 and parts[2].isdigit():
        parts[2] = str(int(parts[2]) + large.num_layers - target.num_layers)
    return ".".join(parts)


def _own_heads(name: str, tensor: torch.Tensor, target: Target) -> torch.Tensor:
    """Of keys and values (H_kv * size, ...) -> (H * size, ...): each query head its own copy."""
    if "k_proj" not in name and "v_proj" not in name:
        return tensor
    heads, size = target.family.cache_shape
    groups = target.model.config.num_attention_heads // heads
    return tensor.unflatten(0, (-1, size)).repeat_interleave(groups, 0).flatten(0, 1)


def _fill(large: torch.Tensor, small: torch.Tensor) -> None:
    large[tuple(slice(length) for length in small.shape)] = small.to(large)
