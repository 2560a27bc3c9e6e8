"""The same function in a larger Llama: acceptance of the small model, cost of the large one.

New dimensions of the hidden state are zero, new heads and new units of an MLP are not read, new
layers, below the old ones, add nothing, and new tokens of the vocabulary are never likely. All of
them are computed all the same. `python -m studies.enlargement 1b FOLDER` writes the shipped models
at one of the sizes `SHAPES`, as folders that every command takes.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from slipstream.core.errors import InputError
from slipstream.speculators.checkpoint import load_speculator, save_speculator
from slipstream.speculators.classifiers import SprinterVerifier
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.loading import DTYPES, load_target
from slipstream.targets.target import Target

# Size of the random weights whose results nothing reads; norms, queries, and the matrices that
# write the hidden state, are zero instead.
UNREAD, ZERO = 0.02, ("norm", "embed_tokens", "lm_head", "q_proj", "o_proj", "down_proj")
# Weights of speculators that read token embeddings at unit size, which have more dimensions now.
SCALED = "root.down", "copying.parent", "copying.child"
# The last dimension of all embeddings, against the size of the others: too small to count in a
# norm, large enough to make new tokens unlikely by so large a negative weight.
CONSTANT, UNLIKELY = 1e-3, -1e9


@dataclass(frozen=True)
class Shape:
    """Sizes of the large model. vocabulary: its tokens, None for as many as there are; tied:
    whether the LM head is the table of embeddings."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    vocabulary: int | None = 32_000
    tied: bool = False


# A target's shape, and that of a draft model of about a twentieth (of the smallest, a tenth).
SHAPES = {
    "100m": (Shape(768, 2048, 10, 12, 4), Shape(288, 768, 2, 8, 8, 32, tied=True)),
    "400m": (Shape(1280, 3456, 18, 20, 4), Shape(448, 1152, 2, 8, 8, 32, tied=True)),
    "1b": (Shape(2048, 5632, 22, 32, 4), Shape(768, 2048, 4, 16, 8, tied=True)),
    "1b_128k": (
        Shape(2048, 5632, 22, 32, 4, vocabulary=128_256),
        Shape(384, 1024, 2, 8, 8, 32, 128_256, tied=True),
    ),
    "3b": (Shape(3072, 8192, 28, 24, 8, 128), Shape(1280, 3456, 6, 16, 8, tied=True)),
    "llama3_8b": (
        Shape(4096, 14336, 32, 32, 8, 128, 128_256),
        Shape(1024, 2816, 12, 16, 8, 64, 128_256, tied=True),
    ),
}


def enlarged_target(target: Target, shape: Shape, dtype: torch.dtype) -> Target:
    """A Llama of `shape` on the target's device that computes what `target` does, rounding apart.

    Raises `InputError` for a target that is no Llama, or that does not fit into `shape`.
    """
    old = target.model.config
    if old.model_type != "llama":
        raise InputError("target: only a Llama can be enlarged; take slipstream/small-target")
    vocabulary = shape.vocabulary or old.vocab_size
    kv_heads, head_dim = target.family.cache_shape
    groups = old.num_attention_heads // kv_heads
    hidden = old.hidden_size + (vocabulary > old.vocab_size)
    sizes = hidden, old.intermediate_size, target.num_layers, groups * shape.kv_heads
    least = Shape(*sizes, kv_heads, head_dim, old.vocab_size)
    wrong = {name for name, size in vars(least).items() if size > (vars(shape)[name] or size)}
    wrong |= {"head_dim"} if shape.head_dim % head_dim else set()
    wrong |= {"heads"} if shape.heads % shape.kv_heads else set()
    if wrong:
        raise InputError(
            f"shape: {', '.join(sorted(wrong))} cannot hold the target; give at least {least}, "
            "heads a multiple of kv_heads, and head_dim a multiple of the target's"
        )
    content = old.to_dict() | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": vocabulary,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": old.rms_norm_eps * old.hidden_size / shape.hidden,
    }
    with torch.device(target.device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**content), dtype=dtype)
    model.generation_config = target.model.generation_config
    large = Target(model.eval().requires_grad_(False), target.tokenizer, target.name)
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        tensor.zero_() if any(part in name for part in ZERO) else tensor.normal_(std=UNREAD)
    for name, tensor in target.model.state_dict().items():
        if "norm" in name:
            tensor = tensor * _norm_scale(target, large)
        _fill(tensors[_moved(name, target, large)], name, tensor, target, large)
    if vocabulary > old.vocab_size:
        embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embeddings[:, -1] = CONSTANT * float(embeddings.abs().max())
        tensors["model.norm.weight"][-1] = 1
        head[old.vocab_size :, -1] = UNLIKELY
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
        place = name
        if name.startswith("adapters."):
            place = _moved(name, target, large)
        elif name.startswith("transitions.") or name in SCALED:
            tensor = tensor * _norm_scale(target, large)
        _fill(state[place].zero_(), name, tensor, target, large)
    found.load_state_dict(state)
    return found.to(large.device, large.dtype).eval()


def enlarged_verifier(
    verifier: SprinterVerifier, large: Target, judged: dict[str, str]
) -> SprinterVerifier:
    """SPRINTER's verifier of the enlarged draft model `large`: it says the same. judged: the
    fingerprint of the enlarged target.

    Raises `InputError` for one that reads token embeddings.
    """
    config = verifier.config
    if "token" in config.features:
        raise InputError("verifier: it reads token embeddings; take one without the feature token")
    found = SprinterVerifier(large, replace(config, judged=judged))
    state, old = found.linear.state_dict(), verifier.linear.state_dict()
    # the state's new dimensions are not read; what else is told of a token comes after them
    states = [verifier.features.draft.hidden_size, large.hidden_size]
    read, new = states if "hidden" in config.features else (0, 0)
    state["weight"].zero_()[:, :read] = old["weight"][:, :read]
    state["weight"][:, new:] = old["weight"][:, read:]
    state["bias"].copy_(old["bias"])
    return found.eval()


def _norm_scale(target: Target, large: Target) -> float:
    """Factor that corrects norms over more dimensions, the new ones zero: they are too large."""
    return (target.hidden_size / large.hidden_size) ** 0.5


def _moved(name: str, target: Target, large: Target) -> str:
    """A tensor's name in `large`, where the old layers come last."""
    parts = name.split(".")
    if len(parts) > 2 and parts[2].isdigit():
        parts[2] = str(int(parts[2]) + large.num_layers - target.num_layers)
    return ".".join(parts)


def _fill(
    place: torch.Tensor, name: str, tensor: torch.Tensor, target: Target, large: Target
) -> None:
    """Write a tensor of the small model to where it belongs in the large one: heads among heads,
    all else at the beginning."""
    indices = [torch.arange(size, device=place.device) for size in tensor.shape]
    part = name.rpartition(".")[2]
    for linear in ("q_proj", "k_proj", "v_proj"):
        if linear in name and part in ("weight", "up"):
            indices[0] = _head_rows(target, large, linear == "q_proj").to(place.device)
    if "q_proj" in name and part in ("weight", "up"):  # attention divides by the head's root
        tensor = tensor * (large.family.cache_shape[1] / target.family.cache_shape[1]) ** 0.5
    if "o_proj" in name and part in ("weight", "down"):
        indices[1] = _head_rows(target, large, True).to(place.device)
    place[torch.meshgrid(*indices, indexing="ij")] = tensor.to(place)


def _head_rows(target: Target, large: Target, queries: bool) -> torch.Tensor:
    """Which dimensions of the large model's heads are those of the small one's: query heads stay in
    the group of their keys, and dimensions keep their rotary frequency."""
    (heads, size), (large_heads, large_size) = target.family.cache_shape, large.family.cache_shape
    group = large_group = 1
    if queries:
        group = target.model.config.num_attention_heads // heads
        large_group = large.model.config.num_attention_heads // large_heads
    places = torch.arange(heads)[:, None] * large_group + torch.arange(group)
    halves = torch.arange(2)[:, None] * (large_size // 2)
    dims = halves + torch.arange(size // 2) * (large_size // size)
    return (places.flatten()[:, None] * large_size + dims.flatten()).flatten()


def write(
    folder: Path,
    size: str,
    dtype: str = "bfloat16",
    streams: Sequence[Path] = (),
    device: str = "auto",
) -> Path:
    """Write the shipped target, draft model, streams and verifier at `size`, as `target`, `draft`,
    `streaming` and `sprinter` in `folder`; and further `streams` of the shipped target, as runs of
    train.py leave them: RUN/model becomes RUN/model in `folder`. What is there stays. device: where
    they are made, 'auto' for CUDA if there is any: of 8 B parameters in seconds."""
    if size not in SHAPES:
        raise InputError(f"size: {size!r} is none; choose among {', '.join(SHAPES)}")
    wanted = {each: f"slipstream/small-{each}" for each in ("streaming", "sprinter")}
    wanted |= {"/".join(each.parts[-2:]): each for each in streams}
    wanted = {name: source for name, source in wanted.items() if not (folder / name).exists()}
    if "streaming" in wanted:
        for part, shape in zip(("target", "draft"), SHAPES[size], strict=True):
            small = load_target(f"slipstream/small-{part}", device=device, packed=False)
            large = enlarged_target(small, shape, DTYPES[dtype])
            large.model.save_pretrained(folder / part)
            large.tokenizer.save_pretrained(folder / part)
            del large
    if wanted:
        small = load_target("slipstream/small-target", device=device, packed=False)
        large = load_target(str(folder / "target"), dtype, device, packed=False)
    for name, source in wanted.items():
        card = f"{source} for the shipped target, enlarged to {size}.\n"
        if name == "sprinter":
            draft = load_target("slipstream/small-draft", device=device, packed=False)
            wide = load_target(str(folder / "draft"), dtype, device, packed=False)
            verifier = enlarged_verifier(load_speculator(source, draft), wide, large.fingerprint)
            save_speculator(folder / name, verifier, wide, 269, card)
        else:
            own = enlarged_speculator(load_speculator(source, small), small, large)
            save_speculator(folder / name, own, large, 281, card)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the shipped models at a larger size.")
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--streams", type=Path, nargs="+", default=[], help="more, by their folder")
    given = parser.parse_args()
    print(f"written: {write(given.folder, given.size, streams=given.streams)}")
