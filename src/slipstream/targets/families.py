"""Where the parts of each architecture family are, and how its layers are called.

What differs between transformers' decoder classes is here, and nothing else; docs/architecture.md
says how to add one. (GPT-2's transposed linears and OPT's flattened rows are known where linears
are replaced or added to: `packed.py`, `lora.py`, the streams' adapters.) Decoder layers are called
as they are, so quantised linears, LoRA and device maps keep working.
"""

from itertools import chain

import torch
from torch import nn

from slipstream.core.cache import StepCache
from slipstream.core.errors import InputError

Rotary = tuple[torch.Tensor, torch.Tensor] | None


def rope_kinds(config) -> set[str | None]:
    """Kinds of rotary positions that a config names, of all layers or of each kind of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    return {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}


def device_of(module: nn.Module) -> torch.device:
    """Where a module runs: with a device map its weights may lie elsewhere until then. (One that is
    packed may have none.)"""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if device is None:
        device = next(chain(module.parameters(), module.buffers()), torch.empty(0)).device
    return torch.device(device)


def context_of(config) -> int:
    """How many positions a config allows, where rotary ones are scaled."""
    most, rope = config.max_position_embeddings, getattr(config, "rope_parameters", None) or {}
    kinds, full = rope_kinds(config), rope.get("full_attention")  # of kinds of layers, if at all
    first = (full or rope).get("original_max_position_embeddings") or most
    if "longrope" in kinds:  # beyond it all rows of a forward would be rotated in another way
        return min(most, first)
    if full:  # such configs name the length after scaling
        return most
    if "yarn" in kinds:  # added to a config, as Qwen's cards say, it stands beside the old length
        return max(most, int((rope.get("factor") or most / first) * first))
    return int(rope["factor"] * most) if "linear" in kinds else most


class Family:
    """Llama-like decoders: rotary positions, pre-norm, separate projections, an MLP module.

    attention: the implementation its modules run with; attention_linears, mlp_linears: names of the
    linears inside a layer; value_linear: the one that computes the values (see `values_of`); mlp:
    name of the MLP module, None where layers have none; layer_list, final_norm: names inside the
    decoder; cache_argument: a layer's keyword for its cache; index: its attention's attribute with
    the layer's index; splits_heads: whether each tensor-parallel process has heads of its own;
    shares_keys: whether a config may say that heads share keys, and how large they are; fused:
    groups of linears with the same input, called in this order (see targets/packed.py).
    """

    attention = "sdpa"
    attention_linears = tuple(f"self_attn.{name}_proj" for name in "qkvo")
    mlp_linears = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    value_linear = "self_attn.v_proj"
    mlp: str | None = "mlp"
    layer_list, final_norm = "layers", "norm"
    cache_argument, index = "past_key_values", "layer_idx"
    splits_heads = shares_keys = True
    fused: tuple[tuple[str, ...], ...] = (attention_linears[:3], mlp_linears[:2])

    def __init__(self, model: nn.Module):
        self.config, self.decoder = model.config, model.get_decoder()
        self.embeddings = model.get_input_embeddings()
        self.layers: nn.ModuleList = getattr(self.decoder, self.layer_list)
        # Others may have the key, which they do not read.
        kind = model.config.model_type
        self.sliding_window: int | None = model.config.sliding_window if kind in WINDOWED else None
        self.kinds: list[str] | None = model.config.layer_types if WINDOWED.get(kind) else None
        # Query heads that share keys.
        self.groups: int = model.config.num_attention_heads // self.cache_shape[0]

    @property
    def cache_shape(self) -> tuple[int, int]:
        """(key/value heads, head size)."""
        heads = self.config.num_attention_heads
        own = self.config if self.shares_keys else object()  # others may have the keys, unread
        size = getattr(own, "head_dim", None) or self.config.hidden_size // heads
        return getattr(own, "num_key_value_heads", heads), size

    def index_of(self, layer: nn.Module) -> int:
        """Which layer this one is, or a copy of."""
        return getattr(layer.get_submodule(self.value_linear.rpartition(".")[0]), self.index)

    def window(self, layer: nn.Module) -> int | None:
        """How many positions a row of this layer may look back, its own included; None for all."""
        if self.sliding_window is None or self.kinds is None:
            return self.sliding_window
        sliding = self.kinds[self.index_of(layer)] == "sliding_attention"
        return self.sliding_window if sliding else None

    def values_of(self, output: torch.Tensor) -> torch.Tensor:
        """The values in an output of `value_linear`, as a (..., H_kv, D_head) view of it."""
        heads, size = self.cache_shape
        return output.unflatten(-1, (-1, size))[..., -heads:, :]

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(B, R) ids at (B, R) positions -> (B, R, D)."""
        return self.embeddings(ids)

    def rotary(self, hidden: torch.Tensor, positions: torch.Tensor) -> Rotary:
        """Cosines and sines of (B, R) positions, or None for families with learned positions."""
        if not hasattr(self.decoder, "rotary_emb"):
            return None
        return self.decoder.rotary_emb(hidden, position_ids=positions)

    def run_layer(
        self,
        layer: nn.Module,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        rotary: Rotary,
        cache: StepCache | None,
    ) -> torch.Tensor:
        """One decoder layer on (B, R, D) rows; `mask` is (B, 1, R, K) boolean."""
        return layer(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rotary,
            **{self.cache_argument: cache},
        )

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm, and whatever else stands between the layers and the LM head."""
        return getattr(self.decoder, self.final_norm)(hidden)


class OPTFamily(Family):
    """OPT: learned positions at the embedding, no MLP module, optional projections in and out."""

    attention_linears = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out"))
    mlp_linears = ("fc1", "fc2")
    mlp, shares_keys = None, False
    fused = (attention_linears[:3],)

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embeddings(ids)
        if self.decoder.project_in is not None:
            hidden = self.decoder.project_in(hidden)
        return hidden + self.decoder.embed_positions(None, 0, position_ids=positions)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.decoder.final_layer_norm is not None:
            hidden = self.decoder.final_layer_norm(hidden)
        return hidden if self.decoder.project_out is None else self.decoder.project_out(hidden)


class GPT2Family(Family):
    """GPT-2: learned positions at the embedding, one fused projection for query, key and value."""

    attention_linears = ("attn.c_attn", "attn.c_proj")
    mlp_linears = ("mlp.c_fc", "mlp.c_proj")
    value_linear = "attn.c_attn"
    layer_list, final_norm, shares_keys = "h", "ln_f", False
    fused = ()

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.embeddings(ids) + self.decoder.wpe(positions)


class Phi3Family(Family):
    """Phi-3: fused projections."""

    splits_heads = False
    attention_linears = ("self_attn.qkv_proj", "self_attn.o_proj")
    mlp_linears = ("mlp.gate_up_proj", "mlp.down_proj")
    value_linear = "self_attn.qkv_proj"
    fused = ()


class OLMo2Family(Family):
    """OLMo 2: a norm over the queries of all heads, and one over the keys."""

    splits_heads = False


class KindsFamily(Family):
    """Gemma 3: layers of each kind have a rotation of their own."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        if cap := getattr(model.config, "final_logit_softcapping", None):
            raise InputError(f"target: logits capped at {cap} are not supported; choose another")

    def rotary(self, hidden, positions) -> dict[str, Rotary]:
        return {kind: self.decoder.rotary_emb(hidden, positions, kind) for kind in set(self.kinds)}

    def run_layer(self, layer, hidden, mask, positions, rotary, cache) -> torch.Tensor:
        sliding = layer.self_attn.sliding_window is not None  # the same for all layers of a kind
        own = rotary["sliding_attention" if sliding else "full_attention"]
        return super().run_layer(layer, hidden, mask, positions, own, cache)


class OLMo3Family(KindsFamily, OLMo2Family):
    """OLMo 3: norms as in OLMo 2, and a rotation for each kind of layers, as in Gemma 3."""


class GraniteFamily(Family):
    """Granite: embeddings are scaled, and so are logits: here what the LM head takes."""

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.embeddings(ids) * self.config.embedding_multiplier

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().norm(hidden) / self.config.logits_scaling


class GPTNeoFamily(GPT2Family):
    """GPT-Neo: every other layer looks back over a window. Its attention module knows only slots of
    an unpadded sequence, so what it does is done here, with its own linears."""

    attention = "eager"
    attention_linears = tuple(f"attn.attention.{name}_proj" for name in ("q", "k", "v", "out"))
    value_linear, index = "attn.attention.v_proj", "layer_id"
    fused = (attention_linears[:3],)

    def window(self, layer: nn.Module) -> int | None:
        local = layer.attn.attention.attention_type == "local"
        return self.config.window_size if local else None

    def run_layer(self, layer, hidden, mask, positions, rotary, cache) -> torch.Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        hidden = hidden.to(device_of(layer.ln_1))  # a device map's hook is the layer's own
        mask = None if mask is None else mask.to(hidden.device)
        attention, normed = layer.attn.attention, layer.ln_1(hidden)
        query, key, value = (
            linear(normed).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if cache is not None:
            key, value = cache.update(key, value, attention.layer_id)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        attended, _ = attend(attention, query, key, value, mask, scaling=1.0)
        hidden = hidden + attention.out_proj(attended.flatten(-2))
        return hidden + layer.mlp(layer.ln_2(hidden))


class GPTNeoXFamily(Family):
    """GPT-NeoX and Pythia: query, key and value of a head side by side in one projection."""

    attention_linears = ("attention.query_key_value", "attention.dense")
    mlp_linears = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    value_linear = "attention.query_key_value"
    final_norm, shares_keys = "final_layer_norm", False
    fused = ()
    cache_argument = "layer_past"

    def values_of(self, output: torch.Tensor) -> torch.Tensor:
        return output.unflatten(-1, (*self.cache_shape[:1], 3, -1))[..., 2, :]


WINDOWED = {"mistral": False, "phi3": False} | dict.fromkeys(
    ("qwen2", "qwen3", "smollm3", "exaone4", "gemma3_text", "olmo3"), True
)
"""Families that read `sliding_window`, and whether `layer_types` says which layers have it."""
FAMILIES: dict[str, type[Family]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "exaone4"), Family),
    "olmo2": OLMo2Family,
    "olmo3": OLMo3Family,
    "gemma3_text": KindsFamily,
    "granite": GraniteFamily,
    "phi3": Phi3Family,
    "opt": OPTFamily,
    "gpt2": GPT2Family,
    "gpt_neo": GPTNeoFamily,
    "gpt_neox": GPTNeoXFamily,
}


def family_of(model: nn.Module) -> Family:
    """The adapter for a transformers model; `InputError` for an architecture without one."""
    kind = model.config.model_type
    check_architecture(kind)
    if ahead := getattr(model.config, "use_bidirectional_attention", None):
        raise InputError(
            f"target: its config has use_bidirectional_attention={ahead}, and decoding is causal "
            "here; choose a model without it"
        )
    return FAMILIES[kind](model)


def check_architecture(kind: str | None) -> None:
    """`InputError` for one without a family."""
    if kind not in FAMILIES:
        raise InputError(
            f"target: architecture {kind!r} is not supported; choose one of "
            f"{', '.join(sorted(FAMILIES))}, or add a Family in slipstream/targets/families.py"
        )
