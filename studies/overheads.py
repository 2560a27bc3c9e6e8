"""Extra parameters and FLOPs of drafting methods on the paper's models (Figures 8 and 9).

Models of the published shapes are made without storage, on PyTorch's meta device, and what each
method runs there is counted by its `FlopCounterMode`: a multiply-add is two FLOPs, and matrix
products alone count. A draft is `gamma` tokens deep. What is counted is what it takes beside the
verifying forward, which all methods need.
"""

from collections.abc import Callable
from itertools import zip_longest

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.core.settings import Count
from slipstream.speculators.medusa import MedusaConfig, MedusaSpeculator
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.lora import LoraSettings
from slipstream.targets.rows import Rows
from studies import Plot, Prompt, Result, Target

COLUMNS = "extra parameters", "GFLOPs per draft", "GFLOPs of the pruning head"


def overheads(
    target: Target,
    prompts: list[Prompt],
    gamma: Count,
    num_msa_layers: Count,
    attended: Count,
    nodes: Count,
    drafted: Count,
    targets: list[dict],
    drafts: list[dict],
) -> Result:
    """All methods on all of `targets`; needs neither the run's target nor its prompts.

    attended: tokens that a row attends to, for EAGLE's layer and the draft model as for streams.
    drafted: nodes of the tree that the pruning head reads; nodes: those that it leaves, each of
    which carries fused streams; deferred ones exist for the last accepted node alone. The head's
    pass is kept apart: the paper does not say whether Figure 9 counts it. targets, drafts: names
    and configs of models; a target names its draft model, or None.
    """
    sizes, rows = dict(num_streams=gamma, num_msa_layers=num_msa_layers), []
    shared = StreamingConfig(**sizes, mode="shared", adapter_rank=0, lora=LoraSettings())
    models = {each["name"]: draft_model(meta_target(each), gamma, attended) for each in drafts}
    for config in targets:
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
            "two models": models.get(config["draft"], (None,)),
        }
        for method, (parameters, *counts) in found.items():
            row = {"target": config["name"], "method": method}
            rows.append(row | dict(zip_longest(COLUMNS, [parameters, *(n / 1e9 for n in counts)])))
    plot = Plot("target", COLUMNS[:2], hue="method", kind="bar", log="x")
    return Result("Overheads (Figures 8 and 9)", rows, (plot,))


def meta_target(config: dict) -> Target:
    """A model without storage; config: its type and sizes, name and draft model aside."""
    sizes = {key: value for key, value in config.items() if key not in ("name", "draft")}
    with torch.device("meta"):
        return Target(AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)).eval())


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
    gamma, cache = config.num_streams, target.new_cache(attended)
    cache.settle([attended - gamma])
    with torch.device("meta"):
        speculator = StreamingSpeculator(target, config)
        state, root = torch.empty(1, 1, target.hidden_size), torch.empty(1, 1).long()
        sees = torch.ones(1, 1, 1, attended - gamma).bool()
    row = flops(lambda: speculator.run_streams(target, state, root, root, sees, cache))
    head = flops(lambda: target.logits(state.expand(gamma, 1, -1)))
    pruning = flops(lambda: target.logits(speculator.early_exit(state[0].repeat(drafted, 1))))
    own = (p.numel() for name, p in speculator.named_parameters() if not name.startswith("lora."))
    return sum(own), carriers * row + head, pruning


def medusa(target: Target, gamma: int) -> tuple[int, int]:
    """Parameters, and FLOPs of a draft: heads of one residual block (N.1), an LM head each."""
    with torch.device("meta"):
        heads = MedusaSpeculator(target, MedusaConfig(num_heads=gamma))
        state = torch.empty(1, target.hidden_size)
    return matrices(heads), flops(lambda: heads.logits(target, state))


def eagle(target: Target, gamma: int, attended: int) -> tuple[int, int]:
    """Parameters, and FLOPs of a draft: a layer behind a linear that joins state and embedding
    drafts a chain, token by token, with the target's embeddings and LM head."""
    layer, width, cache = target.family.layers[0], target.hidden_size, target.new_cache(attended)
    cache.settle([attended - 1])
    with torch.device("meta"):
        join, position = nn.Linear(2 * width, width, bias=False), torch.empty(1, 1).long()
        row = Rows(torch.empty(1, 1, width), position, None)
    joining = flops(lambda: join(row.hidden.repeat(1, 1, 2)))
    token = flops(lambda: target.logits(target.run_modules([layer], row, cache).hidden))
    return matrices(join, layer), gamma * (joining + token)


def draft_model(model: Target, gamma: int, attended: int) -> tuple[int, int]:
    """Parameters, and FLOPs of a draft: a chain, token by token."""
    position, cache = torch.empty(1, 1, device="meta").long(), model.new_cache(attended)
    cache.settle([attended - 1])
    token = flops(lambda: model.logits(model.forward(position, position, None, cache).hidden))
    return matrices(model.model), gamma * token
