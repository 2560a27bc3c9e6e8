"""One short adapter per architecture family: where its parts are and how its layers are called.

Everything that differs between transformers' decoder classes is here, and nothing else: adding a
family is one subclass of `Family` and one line in `FAMILIES`. Decoder layers are called as they
are, so quantised linears, LoRA and device maps keep working.
"""

import torch
from torch import nn

from slipstream.core.cache import StepCache
from slipstream.core.errors import InputError

Rotary = tuple[torch.Tensor, torch.Tensor] | None


class Family:
    """Llama-like decoders: rotary positions, pre-norm, separate projections, an MLP module.

    attention_linears, mlp_linears: names of the linears inside a layer; mlp: name of the MLP
    module, or None for families whose layers have none; value_linear: the linear whose output ends
    with the values.
    """

    attention_linears = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
    )
    mlp_linears = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    mlp: str | None = "mlp"
    value_linear = "self_attn.v_proj"

    def __init__(self, model: nn.Module):
        self.model = model

    @property
    def decoder(self) -> nn.Module:
        return self.model.model

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers

    @property
    def cache_shape(self) -> tuple[int, int]:
        """(key/value heads, head size)."""
        config = self.model.config
        size = getattr(config, "head_dim", None)
        return config.num_key_value_heads, size or config.hidden_size // config.num_attention_heads

    @property
    def max_positions(self) -> int:
        return self.model.config.max_position_embeddings

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(B, R) ids at (B, R) positions -> (B, R, D)."""
        return self.decoder.embed_tokens(ids)

    def rotary(self, hidden: torch.Tensor, positions: torch.Tensor) -> Rotary:
        """Cosines and sines of (B, R) positions, or None for families with learned positions."""
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
            past_key_values=cache,
            position_embeddings=rotary,
        )

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm, and whatever else stands between the layers and the LM head."""
        return self.decoder.norm(hidden)


class OPTFamily(Family):
    """OPT: learned positions at the embedding, no MLP module, optional projections in and out."""

    attention_linears = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.out_proj",
    )
    mlp_linears = ("fc1", "fc2")
    mlp = None

    @property
    def decoder(self) -> nn.Module:
        return self.model.model.decoder

    @property
    def cache_shape(self) -> tuple[int, int]:
        config = self.model.config
        return config.num_attention_heads, config.hidden_size // config.num_attention_heads

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.decoder.embed_tokens(ids)
        if self.decoder.project_in is not None:
            hidden = self.decoder.project_in(hidden)
        return hidden + self.decoder.embed_positions(None, 0, position_ids=positions)

    def rotary(self, hidden: torch.Tensor, positions: torch.Tensor) -> Rotary:
        return None

    def run_layer(self, layer, hidden, mask, positions, rotary, cache) -> torch.Tensor:
        return layer(hidden, attention_mask=mask, position_ids=positions, past_key_values=cache)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.decoder.final_layer_norm is not None:
            hidden = self.decoder.final_layer_norm(hidden)
        return hidden if self.decoder.project_out is None else self.decoder.project_out(hidden)


class GPT2Family(Family):
    """GPT-2: learned positions at the embedding, one fused projection for query, key and value."""

    attention_linears = ("attn.c_attn", "attn.c_proj")
    value_linear = "attn.c_attn"
    mlp_linears = ("mlp.c_fc", "mlp.c_proj")

    @property
    def decoder(self) -> nn.Module:
        return self.model.transformer

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.h

    @property
    def cache_shape(self) -> tuple[int, int]:
        config = self.model.config
        return config.num_attention_heads, config.hidden_size // config.num_attention_heads

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.decoder.wte(ids) + self.decoder.wpe(positions)

    def rotary(self, hidden: torch.Tensor, positions: torch.Tensor) -> Rotary:
        return None

    def run_layer(self, layer, hidden, mask, positions, rotary, cache) -> torch.Tensor:
        return layer(hidden, attention_mask=mask, past_key_values=cache)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder.ln_f(hidden)


FAMILIES: dict[str, type[Family]] = {
    "llama": Family,
    "qwen3": Family,
    "opt": OPTFamily,
    "gpt2": GPT2Family,
}


def family_of(model: nn.Module) -> Family:
    """The adapter for a transformers model; `InputError` for an architecture without one."""
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise InputError(
            f"target: architecture {kind!r} is not supported; choose one of "
            f"{', '.join(sorted(FAMILIES))}, or add a Family in slipstream/targets/families.py"
        )
    return FAMILIES[kind](model)
