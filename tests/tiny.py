"""Tiny random models of every family, for tests."""

import copy
import os
from pathlib import Path

import torch
from tests.reference import DraftTree
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.lora import LoraSettings
from slipstream.targets.target import Target

VOCABULARY = 40
# Where tiny models run: `make gpu-test` tries some tests of the CPU on a CUDA device.
DEVICE = os.environ.get("SLIPSTREAM_TEST_DEVICE", "cpu")
ARCHITECTURES = {
    "llama": dict(
        model_type="llama",
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "qwen3": dict(
        model_type="qwen3",
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    ),
    "opt": dict(
        model_type="opt",
        hidden_size=24,
        ffn_dim=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        word_embed_proj_dim=16,
    ),
    "gpt2": dict(model_type="gpt2", n_embd=24, n_layer=4, n_head=4, n_positions=128),
    "gpt_neo": dict(
        model_type="gpt_neo",
        hidden_size=24,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=6,
    ),
    "gpt_neox": dict(
        model_type="gpt_neox",
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        rotary_pct=0.5,
    ),
}
TWO_KINDS = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2)
LLAMA_LIKE = {
    "mistral": dict(sliding_window=6),
    "qwen2": dict(use_sliding_window=True, sliding_window=6, max_window_layers=2),
    "phi3": dict(sliding_window=6),
    "gemma": dict(head_dim=8),
    "smollm3": dict(no_rope_layer_interval=2),
    "exaone4": dict(sliding_window=6, sliding_window_pattern=2),
    "olmo2": dict(),
    "olmo3": dict(
        **TWO_KINDS,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    # tied, so small a model repeats its last token
    "gemma3_text": TWO_KINDS | dict(head_dim=8, query_pre_attn_scalar=8, tie_word_embeddings=False),
    "granite": dict(embedding_multiplier=3.0, logits_scaling=5.0, residual_multiplier=0.5),
}
for name, own in LLAMA_LIKE.items():
    ARCHITECTURES[name] = ARCHITECTURES["llama"] | dict(model_type=name) | own
BUILT_AS_LLAMA = (
    "exaone4", "gemma", "gemma3_text", "granite", "mistral", "olmo2", "olmo3", "qwen2", "qwen3",
    "smollm3",
)  # fmt: skip
"""Modules of the same names and shapes."""


MADE: dict[str, tuple[PreTrainedModel, torch.Tensor]] = {}
"""Models that were asked for, and the state of chance that making each left behind: a copy is
sooner there than another one."""


def tiny_target(architecture: str = "llama", seed: int = 0, **changes) -> Target:
    """A random float64 target of four layers; large weights, so that answers vary."""
    key = repr((architecture, seed, sorted(changes.items())))
    torch.manual_seed(seed)
    if key not in MADE:
        MADE[key] = tiny_model(architecture, changes), torch.get_rng_state()
    model, chance = MADE[key]
    torch.set_rng_state(chance)
    return Target(copy.deepcopy(model).to(DEVICE), name=f"tiny-{architecture}")


def tiny_model(architecture: str, changes: dict) -> PreTrainedModel:
    arguments = (
        dict(vocab_size=VOCABULARY, max_position_embeddings=128) | ARCHITECTURES[architecture]
    )
    if architecture == "gpt2":
        arguments.pop("max_position_embeddings")
    config = AutoConfig.for_model(
        **(arguments | changes), bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
    return model.double().eval().requires_grad_(False)


def tiny_speculator(target: Target, seed: int = 0, **arguments) -> StreamingSpeculator:
    """A random speculator whose adapters and pruning head are far from zero."""
    torch.manual_seed(seed)
    defaults = dict(num_streams=3, num_msa_layers=2, adapter_rank=4, pruning_rank=4)
    if arguments.get("mode") == "shared":
        defaults |= dict(adapter_rank=0, lora=LoraSettings(rank=4, alpha=4.0))
    speculator = StreamingSpeculator(target, StreamingConfig(**(defaults | arguments))).double()
    with torch.no_grad():
        for parameter in speculator.parameters():
            parameter.normal_(std=0.3)
    return speculator.to(target.device)


def num_extra_parameters(speculator: StreamingSpeculator) -> int:
    """Trained parameters beside the adapters (the paper's "extra parameters")."""
    own = speculator.named_parameters()
    return sum(p.numel() for name, p in own if not name.startswith("adapters."))


def random_tree(num_nodes: int, generator: torch.Generator) -> DraftTree:
    """Random tokens under random parents."""
    parents = [-1] + [
        int(torch.randint(0, node, (), generator=generator)) for node in range(1, num_nodes)
    ]
    tokens = torch.randint(0, VOCABULARY, (num_nodes,), generator=generator).tolist()
    return DraftTree(tokens, parents)


def tiny_tokenizer(size: int = VOCABULARY, prefix: str = "w") -> PreTrainedTokenizerFast:
    """A tokenizer of `size` words: 'w0 w1 w2' becomes [0, 1, 2]."""
    words = {f"{prefix}{number}": number for number in range(size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=f"{prefix}0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=f"{prefix}0")


def reading_target() -> Target:
    """A tiny target that reads and writes text."""
    target = tiny_target()
    target.tokenizer = tiny_tokenizer()
    return target


def save_tiny_target(
    folder: Path, seed: int = 0, tokenizer: PreTrainedTokenizerFast | None = None, **changes
) -> Path:
    """A tiny Llama in float32 with a tokenizer, as a folder that `load_target` opens."""
    tiny_target("llama", seed, **changes).model.float().save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder
