"""How close stream states come to the states they stand for, layer by layer (Figure 5)."""

from itertools import chain, islice, repeat

import torch
import torch.nn.functional as F
from rich.progress import track

from slipstream.core.errors import InputError
from slipstream.core.settings import Count, Text
from slipstream.data.batches import TokenBatches
from slipstream.data.rendering import Sample
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.medusa import MedusaConfig, MedusaSpeculator
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.speculators.streaming.steps import AddedStreams
from slipstream.targets.rows import HiddenTap
from studies import Plot, Prompt, Result, Target
from studies.decoding import answered

MEDUSA = "Medusa heads"


@torch.no_grad()
def similarity(
    target: Target,
    prompts: list[Prompt],
    speculator: Text,
    training_prompts: Count,
    medusa_steps: Count,
) -> Result:
    """Cosine of stream (t, j) with the main row of position t + j, after each MSA layer.

    The target answers all prompts; on the first `training_prompts` Medusa heads that share the
    target's LM head learn for `medusa_steps` steps, on the others everything is measured (these
    heads after the final norm, from where they start). A shipped speculator has learned from far
    more prompts than these heads: the shape over the layers is what counts.
    """
    drafting = load_speculator(speculator, target).to(target.device, target.dtype).eval()
    if drafting.config.mode == "shared":
        raise InputError("study.speculator: the study looks at streams of the lossless mode")
    gamma, first_layer = drafting.num_streams, drafting.first_layer
    names = [f"streams after layer {n}" for n in range(first_layer, target.num_layers)]
    sums, count = {name: torch.zeros(gamma, dtype=torch.float64) for name in [*names, MEDUSA]}, 0
    samples = answered(target, prompts)
    seen, held_out = (
        [sample for sample in part if len(sample.ids) - sample.prompt_length > gamma]
        for part in (samples[:training_prompts], samples[training_prompts:])
    )
    if not (seen and held_out):
        raise InputError(
            f"num_prompts, study.training_prompts: {len(seen)} answers to train on and "
            f"{len(held_out)} to measure have more than {gamma} tokens; give more prompts, and "
            "fewer of them to train on"
        )
    heads = trained_heads(target, gamma, seen, medusa_steps)
    for sample in track(held_out, description="prompts"):
        ids, first = sample.ids, sample.prompt_length - 1
        positions = torch.arange(first, len(ids) - gamma - 1, device=target.device)
        main, streams = states(target, drafting, ids, positions)
        futures = positions[:, None] + torch.arange(1, gamma + 1, device=target.device)
        count += len(positions)
        normed = target.norm(main[-1])
        pairs = [*zip(names, streams, main, strict=True)]
        here = normed[positions]
        guessed = torch.stack([here + F.silu(block(here)) for block in heads.blocks], dim=-2)
        for name, drafted, truth in [*pairs, (MEDUSA, guessed, normed)]:
            sums[name] += F.cosine_similarity(drafted, truth[futures], dim=-1).sum(0).cpu()
    columns = tuple(f"j = {j}" for j in range(1, gamma + 1))
    rows = [
        {"states": name} | dict(zip(columns, (own / count).tolist(), strict=True))
        for name, own in sums.items()
    ]
    plot = Plot("states", (columns,), kind="bar")
    return Result("Cosine of drafted states with the true future ones (Figure 5)", rows, (plot,))


@torch.enable_grad()
def trained_heads(
    target: Target, num_heads: int, samples: list[Sample], steps: int
) -> MedusaSpeculator:
    """Heads that share the target's LM head, after `steps` steps of AdamW on the samples."""
    config = MedusaConfig(num_heads=num_heads, own_heads=False)
    heads = MedusaSpeculator(target, config).to(target.device, target.dtype)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-3)
    batches = TokenBatches(samples, batch_tokens=1024, seed=0, shuffle=True)
    for batch in islice(chain.from_iterable(repeat(batches)), steps):
        optimizer.zero_grad()
        heads.losses(target, batch.to(target.device))[0].backward()
        optimizer.step()
    return heads.requires_grad_(False)


def states(
    target: Target, speculator: StreamingSpeculator, ids: list[int], positions: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """States after each MSA layer: of all main rows, (T, D), and of streams, (P, gamma, D).

    The streams are not told the root, as Medusa heads are not.
    """
    tokens = torch.tensor([ids], device=target.device)
    everywhere = torch.arange(len(ids), device=target.device)[None]
    taps = [HiddenTap(layer) for layer in range(speculator.first_layer + 1, target.num_layers)]
    adding = AddedStreams(target, speculator, positions[None])
    rows = target.forward(tokens, everywhere, None, None, [adding, *taps])
    after = [*(rows.seen[tap.layer][0] for tap in taps), rows.hidden[0]]
    shape = -1, speculator.num_streams
    return (
        [hidden[: len(ids)] for hidden in after],
        [hidden[len(ids) :].unflatten(0, shape) for hidden in after],
    )
