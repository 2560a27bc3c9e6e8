"""How close stream states come to the states they stand for, layer by layer (Figure 5)."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import nn

from slipstream.core.cache import TrainingCache
from slipstream.core.errors import InputError
from slipstream.core.masks import causal_mask
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.plain import PlainDecoder
from slipstream.evaluation.prompts import Prompt
from slipstream.results.record import Plot, Result
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.target import Target, Watch

MEDUSA = "Medusa-style heads"


@torch.no_grad()
def similarity(
    target: Target,
    prompts: list[Prompt],
    speculator: str,
    training_prompts: int,
    medusa_steps: int,
) -> Result:
    """Cosine of stream (t, j) with the main row of position t + j, after each MSA layer.

    The target answers all prompts; on the first `training_prompts` Medusa-style heads learn for
    `medusa_steps` steps, on the others everything is measured. A shipped speculator has learned
    from far more prompts than these heads: the shape over the layers is what counts.
    """
    drafting = load_speculator(speculator, target).to(target.device, target.dtype).eval()
    if drafting.config.mode == "shared":
        raise InputError("study.speculator: the study looks at streams of the lossless mode")
    gamma, first_layer = drafting.num_streams, drafting.first_layer
    names = [f"streams after layer {n}" for n in range(first_layer, target.num_layers)]
    decoder = PlainDecoder(target, Sampling(), Limits(96))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    sums, heads, count = Counter(), None, 0
    for number, prompt in enumerate(track(prompts, description="prompts")):
        ids = render_prompt(target.tokenizer, prompt.text)
        first = len(ids) - 1
        ids = ids + decoder.generate(ids).ids
        if len(ids) - first <= gamma + 1:
            continue
        positions = torch.arange(first, len(ids) - gamma - 1, device=target.device)
        main, streams = states(target, drafting, ids, positions)
        futures = positions[:, None] + torch.arange(1, gamma + 1, device=target.device)
        if number < training_prompts:
            ahead = torch.tensor(ids, device=target.device)[futures + 1]
            seen.append((main[-1][positions], ahead))
            continue
        if heads is None:
            heads = MedusaHeads(target, *map(torch.cat, zip(*seen, strict=True)), medusa_steps)
        count += len(positions)
        pairs = [*zip(names, streams, main, strict=True)]
        for name, drafted, truth in [*pairs, (MEDUSA, heads(main[-1][positions]), main[-1])]:
            close = F.cosine_similarity(drafted, truth[futures], dim=-1).sum(0)
            sums.update({(name, j + 1): float(each) for j, each in enumerate(close)})
    columns = range(1, gamma + 1)
    rows = [
        {"states": name} | {f"j = {j}": sums[name, j] / count for j in columns}
        for name in [*names, MEDUSA]
    ]
    plot = Plot("states", (tuple(f"j = {j}" for j in columns),), kind="bar")
    return Result("Cosine of drafted states with the true future ones (Figure 5)", rows, (plot,))


class MedusaHeads(nn.Module):
    """Head j guesses one future token from the last state alone (Cai et al., 2024, section 3.1):
    h + SiLU(W_j h + b_j), then the target's norm and LM head; W_j, b_j zero at first. Not a
    drafter: trained here for `steps` steps on (M, D) states `hidden` whose next tokens but one,
    two ... are `futures`, (M, heads)."""

    def __init__(self, target: Target, hidden: torch.Tensor, futures: torch.Tensor, steps: int):
        super().__init__()
        heads = [nn.Linear(hidden.shape[1], hidden.shape[1]) for _ in range(futures.shape[1])]
        self.heads = nn.ModuleList(heads).to(hidden)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(0)
        for _ in range(steps):
            rows = torch.randint(len(hidden), (512,), generator=generator)
            optimizer.zero_grad()
            with torch.enable_grad():
                logits = target.logits(self(hidden[rows]))
                F.cross_entropy(logits.float().flatten(0, 1), futures[rows].flatten()).backward()
            optimizer.step()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., D) states after the last layer -> (..., heads, D)."""
        return torch.stack([hidden + F.silu(head(hidden)) for head in self.heads], dim=-2)


def states(
    target: Target, speculator: StreamingSpeculator, ids: list[int], positions: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """States after each MSA layer: of all main rows, (T, D), and of streams, (P, gamma, D).

    The streams are not told the root, as Medusa-style heads are not.
    """
    layers = target.family.layers[speculator.first_layer :]
    cache, early = TrainingCache(target.num_layers), Watch(speculator.first_layer)
    tokens = torch.tensor([ids], device=target.device)
    everywhere = torch.arange(len(ids), device=target.device)[None]
    with _recorded(layers) as main:
        target.forward(tokens, everywhere, None, cache, [early])
    cache.keep = 0
    sees = causal_mask(len(ids), target.device)[positions][None, None]
    roots = torch.full((1, len(positions)), -1, device=target.device)
    with _recorded(layers) as streams:
        own = early.hidden[:, positions]
        speculator.run_streams(target, own, roots, positions[None], sees, cache)
    gamma = speculator.num_streams
    drafted = [each[0, -len(positions) * gamma :].unflatten(0, (-1, gamma)) for each in streams]
    return [hidden[0] for hidden in main], drafted


@contextmanager
def _recorded(layers: list[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """Within, what each of `layers` puts out is appended to the list."""
    found: list[torch.Tensor] = []

    def keep(_, __, output) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
