"""Extra parameters and FLOPs of drafting methods on the paper's models (Figures 8 and 9).

Models of the published shapes are made without storage, on PyTorch's meta device, and what each
method runs there is counted by its `FlopCounterMode`: a multiply-add is two FLOPs, and matrix
products alone count. A draft is `gamma` tokens deep. What is counted is what it takes beside the
verifying forward, which all methods need.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PretrainedConfig

from slipstream.speculators.medusa import MedusaConfig, MedusaSpeculator
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.lora import LoraSettings
from slipstream.targets.rows import Rows
from studies import Plot, Prompt, Result, Target


def llama(
    hidden: int, layers: int, intermediate: int, vocabulary: int, key_width: int
) -> LlamaConfig:
    """key_width: of a token's keys; heads are 64 wide, which changes neither count."""
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=key_width // 64,
    )  # fmt: skip


def opt(hidden: int, layers: int) -> OPTConfig:
    return OPTConfig(
        hidden_size=hidden, word_embed_proj_dim=hidden, ffn_dim=4 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
    )  # fmt: skip


LLAMA_68M, OPT_125M = llama(768, 2, 3072, 32000, 768), opt(768, 12)
# The targets, and the draft models of section 3's pairs; the paper names none for Phi-3 and
# Mistral.
PAIRS: dict[str, tuple[PretrainedConfig, PretrainedConfig | None]] = {
    "OPT-1.3B": (opt(2048, 24), OPT_125M),
    "OPT-6.7B": (opt(4096, 32), OPT_125M),
    "Phi-3-mini": (llama(3072, 32, 8192, 32064, 3072), None),
    "Mistral-7B": (llama(4096, 32, 14336, 32000, 1024), None),
    "Llama-2-7B, Vicuna-7B": (llama(4096, 32, 11008, 32000, 4096), LLAMA_68M),
    "Llama-2-13B, Vicuna-13B": (llama(5120, 40, 13824, 32000, 5120), LLAMA_68M),
    "Vicuna-33B": (llama(6656, 60, 17920, 32000, 6656), LLAMA_68M),
}


def overheads(
    target: Target,
    prompts: list[Prompt],
    gamma: int,
    num_msa_layers: int,
    attended: int,
    nodes: int,
    drafted: int,
) -> Result:
    """All methods on all of `PAIRS`; needs neither the run's target nor its prompts.

    attended: tokens that a row attends to, itself included: of streams the limit of H.1, for
    EAGLE's layer and the draft model a context of as many. drafted: nodes of the tree that the
    pruning head reads; nodes: those that it leaves, each of which carries fused streams, while
    deferred ones exist for the last accepted node alone. The head's pass is kept apart: the paper
    does not say whether Figure 9 counts it, and without pruning there is none.
    """
    sizes, rows = dict(num_streams=gamma, num_msa_layers=num_msa_layers), []
    shared = StreamingConfig(**sizes, mode="shared", adapter_rank=0, lora=LoraSettings())
    for name, (config, draft) in PAIRS.items():
        large = meta_target(config)
        # H.2: lossless streams skip the MLP for their adapter where it is a module; in OPT they run
        # through it with adapters beside it
        lossless = StreamingConfig(**sizes, mlp="adapter" if large.family.mlp else "base+adapter")
        found = {
            "streaming, shared": streams(large, shared, attended, nodes, drafted),
            "streaming, fused": streams(large, lossless, attended, nodes, drafted),
            "streaming, deferred": streams(large, lossless, attended, 1, drafted),
            "Medusa": medusa(large, gamma),
            "EAGLE": eagle(large, gamma, attended),
            "two models": draft_model(meta_target(draft), gamma, attended) if draft else (),
        }
        for method, counts in found.items():
            parameters, flops, pruning = [*counts, None, None, None][:3]
            rows.append(
                {
                    "target": name,
                    "method": method,
                    "extra parameters": parameters,
                    "GFLOPs per draft": flops and flops / 1e9,
                    "GFLOPs of the pruning head": pruning and pruning / 1e9,
                }
            )
    panels = "extra parameters", "GFLOPs per draft"
    plot = Plot("target", panels, hue="method", kind="bar", log="x")
    return Result("Overheads (Figures 8 and 9)", rows, (plot,))


def meta_target(config: PretrainedConfig) -> Target:
    """A model without storage."""
    with torch.device("meta"):
        return Target(AutoModelForCausalLM.from_config(config).eval())


def flops(run: Callable[[], object]) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def matrices(*modules: nn.Module) -> int:
    """Weights of all matrices; biases and norms, less than 0.1 % of a model, are left out."""
    return sum(p.numel() for module in modules for p in module.parameters() if p.ndim > 1)


def streams(
    target: Target, config: StreamingConfig, attended: int, carriers: int, drafted: int
) -> tuple[int, int, int]:
    """Parameters, FLOPs of a draft and of the pruning head, for streams of so many `carriers`. LoRA
    does not count: the fine-tuned baseline has it, too, and it is merged. The LM head runs for the
    streams of one carrier alone."""
    with torch.device("meta"):
        speculator = StreamingSpeculator(target, config)
        state, root = torch.empty(1, 1, target.hidden_size), torch.empty(1, 1).long()
        sees = torch.ones(1, 1, 1, attended - config.num_streams).bool()
    cache = target.new_cache(attended)
    cache.settle([attended - config.num_streams])
    row = flops(lambda: speculator.run_streams(target, state, root, root, sees, cache))
    head = flops(lambda: target.logits(state.expand(config.num_streams, 1, -1)))
    pruning = flops(lambda: speculator.early_exit_logits(target, state[0].repeat(drafted, 1)))
    parameters = speculator.num_extra_parameters()
    if config.mode == "lossless":
        parameters += speculator.num_adapter_parameters()
    return parameters, carriers * row + head, pruning


def medusa(target: Target, gamma: int) -> tuple[int, int]:
    """Parameters, and FLOPs of a draft: heads of one residual block (N.1), an LM head each."""
    with torch.device("meta"):
        heads = MedusaSpeculator(target, MedusaConfig(num_heads=gamma))
        state = torch.empty(1, target.hidden_size)
    return matrices(heads), flops(lambda: heads.logits(target, state))


def eagle(target: Target, gamma: int, attended: int) -> tuple[int, int]:
    """Parameters, and FLOPs of a draft: a layer behind a linear that joins state and embedding
    drafts a chain, token by token, with the target's embeddings and LM head."""
    layer, width = target.family.layers[0], target.hidden_size
    with torch.device("meta"):
        join, pair = nn.Linear(2 * width, width, bias=False), torch.empty(1, 1, 2 * width)
        position = torch.empty(1, 1).long()
    cache = target.new_cache(attended)
    cache.settle([attended - 1])

    def token() -> None:
        rows = target.run_modules([layer], Rows(join(pair), position, None), cache)
        target.logits(rows.hidden)

    return matrices(join, layer), gamma * flops(token)


def draft_model(model: Target, gamma: int, attended: int) -> tuple[int, int]:
    """Parameters, and FLOPs of a draft: a chain, token by token."""
    position, cache = torch.empty(1, 1, device="meta").long(), model.new_cache(attended)
    cache.settle([attended - 1])
    row = flops(lambda: model.logits(model.forward(position, position, None, cache).hidden))
    return matrices(model.model), gamma * row
