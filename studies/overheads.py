"""Extra parameters and FLOPs of drafting methods, from the shapes of the target (Figures 8, 9).

A multiply-add is two FLOPs, and matrix products alone count. Parameters are those of matrices and
of stream embeddings; biases and norms, less than 0.1 % of them, are left out. A draft is `gamma`
tokens deep. What is counted is what it takes beside the verifying forward, which all methods need.
"""

from dataclasses import dataclass

from slipstream.evaluation.prompts import Prompt
from slipstream.results.record import Plot, Result
from slipstream.targets.target import Target


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    key_width: of a token's keys, and of its values; mlp_matrices: in a layer's MLP; mlp_module:
    whether the MLP is a module of its own, which streams can skip (`Family.mlp`); tables: weights
    that are looked up and never multiplied, where the decoder drafts.
    """

    hidden: int
    layers: int
    intermediate: int
    vocabulary: int
    key_width: int
    mlp_matrices: int = 3
    mlp_module: bool = True

    tables: int = 0

    @property
    def attention(self) -> int:
        """Weights of a layer's attention."""
        return 2 * self.hidden * (self.hidden + self.key_width)

    @property
    def layer(self) -> int:
        """Weights of a layer."""
        return self.attention + self.mlp_matrices * self.hidden * self.intermediate

    @property
    def head(self) -> int:
        """Weights of the LM head."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """Weights of all matrices."""
        return self.layers * self.layer + self.head + self.tables

    def row(self, attended: int) -> int:
        """Multiply-adds of a row's way through all layers and the LM head; in each layer it
        attends to `attended` tokens (scores, and sum of values)."""
        return self.layers * (self.layer + 2 * attended * self.hidden) + self.head


SHAPES = {
    "OPT-1.3B": Shape(2048, 24, 8192, 50272, 2048, mlp_matrices=2, mlp_module=False),
    "OPT-6.7B": Shape(4096, 32, 16384, 50272, 4096, mlp_matrices=2, mlp_module=False),
    "Phi-3-mini": Shape(3072, 32, 8192, 32064, 3072),
    "Mistral-7B": Shape(4096, 32, 14336, 32000, 1024),
    "Llama-2-7B, Vicuna-7B": Shape(4096, 32, 11008, 32000, 4096),
    "Llama-2-13B, Vicuna-13B": Shape(5120, 40, 13824, 32000, 5120),
    "Vicuna-33B": Shape(6656, 60, 17920, 32000, 6656),
}
# JackFram/llama-68m; embeddings and LM head are two matrices
LLAMA_68M = Shape(768, 2, 3072, 32000, 768, tables=32000 * 768)
# facebook/opt-125m; embeddings and LM head are one matrix, positions are looked up
OPT_125M = Shape(768, 12, 3072, 50272, 768, mlp_matrices=2, mlp_module=False, tables=2050 * 768)
DRAFT_MODELS = {
    "OPT-1.3B": OPT_125M,
    "OPT-6.7B": OPT_125M,
    "Llama-2-7B, Vicuna-7B": LLAMA_68M,
    "Llama-2-13B, Vicuna-13B": LLAMA_68M,
    "Vicuna-33B": LLAMA_68M,
}
"""The pairs of section 3; the paper names none for Phi-3 and Mistral."""
RANK = 8
"""Of stream adapters (H.2) and of the pruning head (N.1)."""


@dataclass(frozen=True)
class Cost:
    """parameters: beyond the target's; flops: of one draft; pruning_flops: of the pruning head's
    pass over one tree, None for methods without. All None for a pair that the paper does not name.
    """

    method: str
    parameters: int | None
    flops: int | None
    pruning_flops: int | None = None


def overheads(
    target: Target,
    prompts: list[Prompt],
    gamma: int,
    num_msa_layers: int,
    attended: int,
    nodes: int,
    drafted: int,
) -> Result:
    """All methods on all of `SHAPES`; the arguments are those of `costs`. Nothing is run."""
    rows = [
        {
            "target": name,
            "method": cost.method,
            "extra parameters": cost.parameters,
            "GFLOPs per draft": cost.flops and cost.flops / 1e9,
            "GFLOPs of the pruning head": cost.pruning_flops and cost.pruning_flops / 1e9,
        }
        for name in SHAPES
        for cost in costs(name, gamma, num_msa_layers, attended, nodes, drafted)
    ]
    panels = "extra parameters", "GFLOPs per draft"
    plot = Plot("target", panels, hue="method", kind="bar", log="x")
    return Result("Overheads (Figures 8 and 9)", rows, (plot,))


def costs(
    name: str,
    gamma: int = 4,
    num_msa_layers: int = 4,
    attended: int = 64,
    nodes: int = 32,
    drafted: int = 121,
) -> list[Cost]:
    """All methods on the target called `name` in `SHAPES`.

    attended: tokens that a row attends to: of streams the limit of H.1, for EAGLE's layer and the
    draft model a context of as many. drafted: nodes of the tree that the pruning head reads, the
    full one of gamma 4 and k 3; nodes: those that it leaves.
    """
    shape, draft = SHAPES[name], DRAFT_MODELS.get(name)
    # Medusa: heads of one residual block (N.1) and an LM head each
    medusa = gamma * (shape.hidden**2 + shape.head)
    # EAGLE: a layer behind a linear that joins state and embedding; it drafts a chain, token by
    # token, with the target's embeddings and LM head
    eagle = shape.layer + 2 * shape.hidden**2
    token = eagle + 2 * attended * shape.hidden + shape.head
    return [
        *_streaming(shape, gamma, num_msa_layers, attended, nodes, drafted),
        Cost("Medusa", medusa, 2 * medusa),
        Cost("EAGLE", eagle, 2 * gamma * token),
        # the draft model drafts a chain, token by token
        Cost("two models", draft.parameters, 2 * gamma * draft.row(attended))
        if draft
        else Cost("two models", None, None),
    ]


def _streaming(
    shape: Shape, gamma: int, num_msa_layers: int, attended: int, nodes: int, drafted: int
) -> list[Cost]:
    """Shared mode (LoRA not counted: the fine-tuned baseline has it, too, and it is merged), and
    lossless mode in both schedules.

    Fused streams exist for each of `nodes`, deferred ones for the last accepted node; the LM head
    runs for the streams of that node alone. Streams of shared mode run through the MLP. Lossless
    streams skip it for their adapter (H.2) where it is a module; in OPT, where it is not, they run
    through it with adapters beside it. The pruning head's pass, `drafted * (h V + 2 RANK h)`
    multiply-adds, is kept apart: the paper's text does not count it among the costs of a draft and
    does not say whether Figure 9 does, and without pruning there is none.
    """
    adapters = num_msa_layers * _adapter_weights(shape)
    whole = num_msa_layers * (shape.layer + 2 * attended * shape.hidden)
    mlp = shape.layer - shape.attention
    skipping = whole - num_msa_layers * mlp if shape.mlp_module else whole
    own = (gamma + 2 * RANK) * shape.hidden
    pruning = 2 * drafted * (shape.head + 2 * RANK * shape.hidden)

    def cost(schedule: str, parameters: int, row: int, carrying: int) -> Cost:
        flops = 2 * gamma * (carrying * row + shape.head)
        return Cost(f"streaming, {schedule}", parameters, flops, pruning)

    return [
        cost("shared", own, whole, nodes),
        cost("fused", own + adapters, skipping + adapters, nodes),
        cost("deferred", own + adapters, skipping + adapters, 1),
    ]


def _adapter_weights(shape: Shape) -> int:
    """Of a layer's stream adapters: beside each linear of the attention, and either in place of the
    MLP or beside each of its linears."""
    attention = 6 * shape.hidden + 2 * shape.key_width
    beside = shape.mlp_matrices * (shape.hidden + shape.intermediate)
    return RANK * (attention + (2 * shape.hidden if shape.mlp_module else beside))
