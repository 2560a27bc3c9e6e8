"""Extra parameters and FLOPs of drafting methods, from the shapes of the target (Figures 8, 9).

A multiply-add is two FLOPs; matrix products alone count. A draft is `gamma` tokens deep; methods
with trees are counted for one draft each, beside the verifying forward that all of them need.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder: width, layers, width of the MLP and its matrices, vocabulary, and the
    width of keys."""

    hidden: int
    layers: int
    intermediate: int
    vocabulary: int
    key_width: int
    mlp_matrices: int = 3

    @property
    def attention(self) -> int:
        """Weights of a layer's attention."""
        return 2 * self.hidden * self.hidden + 2 * self.hidden * self.key_width

    @property
    def layer(self) -> int:
        """Weights of a layer."""
        return self.attention + self.mlp_matrices * self.hidden * self.intermediate

    @property
    def head(self) -> int:
        """Weights of the LM head."""
        return self.hidden * self.vocabulary


SHAPES = {
    "OPT-1.3B": Shape(2048, 24, 8192, 50272, 2048, mlp_matrices=2),
    "OPT-6.7B": Shape(4096, 32, 16384, 50272, 4096, mlp_matrices=2),
    "Phi-3-mini": Shape(3072, 32, 8192, 32064, 3072),
    "Mistral-7B": Shape(4096, 32, 14336, 32000, 1024),
    "Llama-2-7B, Vicuna-7B": Shape(4096, 32, 11008, 32000, 4096),
    "Llama-2-13B, Vicuna-13B": Shape(5120, 40, 13824, 32000, 5120),
    "Vicuna-33B": Shape(6656, 60, 17920, 32000, 6656),
}
DRAFT_MODELS = {"OPT-1.3B": 125_000_000, "OPT-6.7B": 125_000_000}
"""Parameters of the small model of a pair; 68 M where the paper drafts with a small Llama."""
LLAMA_68M = 68_000_000


@dataclass(frozen=True)
class Cost:
    """parameters: beyond the target's; flops: of one draft of gamma tokens."""

    method: str
    parameters: int
    flops: int


def costs(
    name: str, gamma: int = 4, num_msa_layers: int = 4, attended: int = 64, nodes: int = 32
) -> list[Cost]:
    """All methods on the target called `name` in `SHAPES`.

    attended: tokens a stream attends to (H.1). nodes: of the tree, each of which carries streams in
    the fused schedule; deferred streams exist for one node. Lossless streams skip the MLP for their
    adapter of rank 8 (H.2), those of shared mode run through it; the LM head runs for the streams
    of the node that was chosen.
    """
    shape, rank = SHAPES[name], 8
    adapters = num_msa_layers * rank * (8 * shape.hidden + 2 * shape.key_width)
    attention = shape.attention + 2 * attended * shape.hidden
    row = num_msa_layers * attention + adapters
    whole = num_msa_layers * (attention + shape.layer - shape.attention)
    pair = DRAFT_MODELS.get(name, LLAMA_68M)
    own = (gamma + 2 * rank) * shape.hidden
    return [
        Cost("streaming, shared", own, 2 * gamma * (nodes * whole + shape.head)),
        Cost("streaming, fused", own + adapters, 2 * gamma * (nodes * row + shape.head)),
        Cost("streaming, deferred", own + adapters, 2 * gamma * (row + shape.head)),
        Cost(
            "Medusa",
            gamma * (shape.hidden**2 + shape.head),
            2 * gamma * (shape.hidden**2 + shape.head),
        ),
        Cost(
            "EAGLE",
            shape.layer + 2 * shape.hidden**2,
            2 * gamma * (shape.layer + 2 * shape.hidden**2 + shape.head),
        ),
        Cost("two models", pair, 2 * gamma * pair),
    ]
