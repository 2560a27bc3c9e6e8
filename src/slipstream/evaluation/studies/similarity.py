"""How close stream states come to the states they stand for, layer by layer (Figure 5)."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import nn

from slipstream.core.cache import TrainingCache
from slipstream.core.errors import InputError
from slipstream.core.masks import causal_mask
from slipstream.core.sampling import Sampling
from slipstream.data.batches import TokenBatches
from slipstream.data.rendering import Sample, render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.plain import PlainDecoder
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.medusa import MedusaConfig, MedusaSpeculator
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.rows import HiddenTap
from slipstream.targets.target import Target

MEDUSA = "Medusa heads"


class SimilarityStudy:
    """Cosine of stream (t, j) with the main row of position t + j, after each MSA layer.

    The target answers all prompts; on the first `training_prompts` Medusa heads that share the
    target's LM head learn for `medusa_steps` steps, on the others everything is measured (these
    heads after the final norm, from where they start). A shipped speculator has learned from far
    more prompts than these heads: the shape over the layers is what counts.
    """

    def __init__(self, speculator: str, training_prompts: int, medusa_steps: int):
        self.speculator = speculator
        self.training_prompts, self.medusa_steps = training_prompts, medusa_steps

    @torch.no_grad()
    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        speculator = load_speculator(self.speculator, target).to(target.device, target.dtype).eval()
        if speculator.config.mode == "shared":
            raise InputError("study.speculator: the study looks at streams of the lossless mode")
        gamma = speculator.num_streams
        decoder = PlainDecoder(target, Sampling(), Limits(96))
        seen: list[Sample] = []
        sums: dict[tuple[int, int], float] = {}
        heads, count = None, 0
        for number, prompt in enumerate(track(prompts, description="prompts")):
            ids = render_prompt(target.tokenizer, prompt.text)
            first = len(ids) - 1
            ids = ids + decoder.generate(ids).ids
            if len(ids) - first <= gamma + 1:
                continue
            if number < self.training_prompts:
                seen.append(Sample(ids, first + 1))
                continue
            if heads is None:
                heads = trained_heads(target, gamma, seen, self.medusa_steps)
            positions = torch.arange(first, len(ids) - gamma - 1, device=target.device)
            main, streams = states(target, speculator, ids, positions)
            futures = positions[:, None] + torch.arange(1, gamma + 1, device=target.device)
            count += len(positions)
            normed = target.norm(main[-1])
            guesses = heads.states(normed[positions])
            for layer, (truth, drafted) in enumerate(zip(main, streams, strict=True)):
                close = F.cosine_similarity(drafted, truth[futures], dim=-1).sum(0)
                for j in range(gamma):
                    key = (speculator.first_layer + layer, j + 1)
                    sums[key] = sums.get(key, 0.0) + float(close[j])
            close = F.cosine_similarity(guesses, normed[futures], dim=-1).sum(0)
            for j in range(gamma):
                sums[-1, j + 1] = sums.get((-1, j + 1), 0.0) + float(close[j])
        rows = [
            {
                "states": MEDUSA if layer < 0 else f"streams after layer {layer}",
                **{f"j = {j + 1}": sums[layer, j + 1] / count for j in range(gamma)},
            }
            for layer in [*range(speculator.first_layer, target.num_layers), -1]
        ]
        title = "Cosine of drafted states with the true future ones (Figure 5)"
        return Findings(title, rows, lambda figure: _draw(figure, rows))


@torch.enable_grad()
def trained_heads(
    target: Target, num_heads: int, samples: list[Sample], steps: int
) -> MedusaSpeculator:
    """Heads that share the target's LM head, after `steps` steps of AdamW on the samples."""
    config = MedusaConfig(num_heads=num_heads, own_heads=False)
    heads = MedusaSpeculator(target, config).to(target.device, target.dtype)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-3)
    batches = TokenBatches(samples, batch_tokens=1024, seed=0, shuffle=True)
    step = 0
    while step < steps:
        for batch in islice(batches, steps - step):
            optimizer.zero_grad()
            heads.losses(target, batch.to(target.device))[0].backward()
            optimizer.step()
            step += 1
    return heads.requires_grad_(False)


def states(
    target: Target, speculator: StreamingSpeculator, ids: list[int], positions: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """States after each MSA layer: of all main rows, (T, D), and of streams, (P, gamma, D).

    The streams are not told the root, as Medusa heads are not.
    """
    layers = target.family.layers[speculator.first_layer :]
    cache = TrainingCache(target.num_layers)
    tokens = torch.tensor([ids], device=target.device)
    everywhere = torch.arange(len(ids), device=target.device)[None]
    early = HiddenTap(speculator.first_layer)
    with recorded(layers) as main:
        target.forward(tokens, everywhere, None, cache, [early])
    cache.keep = 0
    sees = causal_mask(len(ids), target.device)[positions][None, None]
    roots = torch.full((1, len(positions)), -1, device=target.device)
    with recorded(layers) as streams:
        speculator.run_streams(
            target, early.hidden[:, positions], roots, positions[None], sees, cache
        )
    gamma = speculator.num_streams
    return (
        [hidden[0] for hidden in main],
        [hidden[0, -len(positions) * gamma :].unflatten(0, (-1, gamma)) for hidden in streams],
    )


@contextmanager
def recorded(layers: list[nn.Module]) -> Iterator[list[torch.Tensor]]:
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


def _draw(figure, rows: list[dict]) -> None:
    axes = figure.subplots()
    names = [name for name in rows[0] if name != "states"]
    streams = [row for row in rows if row["states"] != MEDUSA]
    medusa = next(row for row in rows if row["states"] == MEDUSA)
    labels = [row["states"].removeprefix("streams after ") for row in streams]
    for place, name in enumerate(names):
        color = f"C{place}"
        axes.plot(labels, [row[name] for row in streams], marker="o", color=color, label=name)
        axes.plot([labels[-1]], [medusa[name]], marker="x", color=color, linestyle="none")
    axes.plot([], [], marker="x", color="grey", linestyle="none", label=MEDUSA)
    axes.set_ylabel("cosine with the true future state")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
