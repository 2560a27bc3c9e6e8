"""The arguments of a streaming speculator, checked on their own and against a target."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from slipstream.core.errors import InputError
from slipstream.core.settings import Amount, Count, NotNegative, Rank, Share, Size
from slipstream.speculators.base import SpeculatorConfig
from slipstream.targets.lora import LoraSettings
from slipstream.targets.target import Target


@dataclass(frozen=True)
class StreamingConfig(SpeculatorConfig):
    """Speculative Streaming, sections 2.1 to 2.3. Defaults are the paper's,
    but for `mlp` and `attended_tokens` (conf/speculator/streaming_paper.yaml has those).

    mode: 'lossless' leaves the target as it is, 'shared' fine-tunes it with `lora` and lets its
    main stream see the streams. num_streams: gamma, how many tokens beyond the next one are
    drafted. num_msa_layers: N_s, how many of the top layers the streams run through.
    adapter_rank: rank of the adapters that act on stream rows alone (lossless mode), 0 for none.
    mlp: 'base+adapter' (adapters beside the frozen MLP) or 'adapter' (streams skip the MLP and
    take the low-rank adapter alone). initialisation_rank: rank eta of f_eta, 0 for the identity.
    root_rank: rank of the map that tells deferred streams the root of the tree they draft, which
    is decided before they run; 0 for streams that never know it, as in the paper.
    transition_rank: rank of the scores that prefer some pairs of a token and the next one when a
    tree is grown; 0 for streams that propose independently, as in the paper.
    copy_scores: whether pairs that occur in the text so far are preferred by a learned measure;
    false in the paper.
    stream_positions: 'shifted' gives stream j of position t the rotary position t + j, 'same'
    gives it t; learned positions are always those of t. value_rotation: epsilon of Eq. 8, which
    tells streams apart by rotated values, or 0 for stream embeddings. attended_tokens: p of
    appendix H.1, to how many of the tokens that their main row attends to most (per layer and
    head) streams attend, 0 for all. pruning_layer: before which layer the pruning head reads and
    nodes are dropped, None for L - N_s. pruning_rank: rank of the pruning head.

    How it learns (section 2.4): main_weight: alpha_0, None for 0 (lossless) or 1 (shared);
    stream_weights: alpha_j of each stream, None for 1 (lossless) or 0.1 (shared); root_dropout: the
    share of training rows whose streams are not told the root, so that a speculator that may be
    told it (`root_rank`) also serves the fused schedule, which cannot.
    """

    kind: ClassVar[str] = "streaming"
    mode: Literal["lossless", "shared"] = "lossless"
    num_streams: Size = 4
    num_msa_layers: Count = 4
    adapter_rank: Rank = 8
    mlp: Literal["base+adapter", "adapter"] = "base+adapter"
    initialisation_rank: Rank = 0
    root_rank: Rank = 0
    transition_rank: Rank = 0
    copy_scores: bool = False
    stream_positions: Literal["shifted", "same"] = "shifted"
    value_rotation: NotNegative = 0.0
    attended_tokens: Amount = 0
    pruning_layer: Amount | None = None
    pruning_rank: Size = 8
    lora: LoraSettings | None = None
    main_weight: NotNegative | None = None
    stream_weights: Sequence[NotNegative] | None = None
    root_dropout: Share = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "shared" and (
            self.lora is None or self.adapter_rank or self.root_rank or self.mlp == "adapter"
        ):
            raise InputError(
                "speculator.mode: shared mode trains speculator.lora on all rows, and its streams "
                "run before the root is decided; give speculator.lora, and set "
                "speculator.adapter_rank=0 speculator.root_rank=0 speculator.mlp=base+adapter"
            )
        if self.mode == "lossless" and self.lora is not None:
            raise InputError(
                "speculator.lora: lossless mode leaves the target as it is; set it to null, or "
                "speculator.mode=shared"
            )
        if self.stream_weights is not None and len(self.stream_weights) != self.num_streams:
            raise InputError("speculator.stream_weights: give one number per stream, or null")
        if self.mode == "lossless" and self.main_weight:
            raise InputError("speculator.main_weight: lossless mode does not train the main stream")

    def additions(self, schedule: str) -> list[str]:
        """Which of this project's additions to the paper act in a schedule."""
        told_root = self.root_rank and schedule == "deferred"
        on = {"root": told_root, "pairs": self.transition_rank, "copying": self.copy_scores}
        return [name for name, acts in on.items() if acts]

    @classmethod
    def from_arguments(cls, arguments: dict) -> "StreamingConfig":
        lora = arguments.get("lora")
        return super().from_arguments(arguments | {"lora": lora and LoraSettings(**lora)})

    def check_against(self, target: Target) -> None:
        """`InputError` when `target` cannot carry this speculator."""
        if self.num_msa_layers > target.num_layers:
            raise InputError(
                f"speculator.num_msa_layers: {self.num_msa_layers} is more than the target's "
                f"{target.num_layers} layers; choose at most {target.num_layers}"
            )
        if self.pruning_layer is not None and self.pruning_layer >= target.num_layers:
            raise InputError(
                f"speculator.pruning_layer: must be less than {target.num_layers}, the number of "
                "the target's layers"
            )
        if self.attended_tokens > target.max_positions:
            raise InputError(
                f"speculator.attended_tokens: {self.attended_tokens} is more than the target's "
                f"{target.max_positions} positions; give 0 for all of them"
            )
        limit = math.pi / 2 / (target.max_positions + self.num_streams)
        if self.value_rotation > limit:
            raise InputError(
                f"speculator.value_rotation: must be between 0 and {limit:.3g}, a quarter turn "
                "over all positions and streams"
            )
        if self.mlp == "adapter" and target.family.mlp is None:
            raise InputError(
                "speculator.mlp: 'adapter' needs an MLP module inside the layer, which "
                f"{target.model.config.model_type} has not; choose 'base+adapter'"
            )
