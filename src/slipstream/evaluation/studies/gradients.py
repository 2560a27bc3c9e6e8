"""Where the streams' losses pull: gradient norms of the MLPs by layer (Figure 6)."""

import torch
from rich.progress import track

from slipstream.core.sampling import Sampling
from slipstream.data.batches import collate
from slipstream.data.rendering import Sample, render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.plain import PlainDecoder
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.segments import shared_losses
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.target import Target

START = "at the start"


class GradientStudy:
    """Shared mode: norms over the prompts' answers, for untrained streams and for trained ones.

    speculator: the config at the start; trained: names and folders of speculators of the same kind.
    """

    def __init__(self, speculator: StreamingConfig, trained: dict[str, str]):
        self.config, self.trained = speculator, trained

    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        decoder = PlainDecoder(target, Sampling(), Limits(96))
        samples = []
        for prompt in track(prompts, description="answers"):
            ids = render_prompt(target.tokenizer, prompt.text)
            samples.append(Sample(ids + decoder.generate(ids).ids, len(ids)))
        speculators = {START: StreamingSpeculator(target, self.config).to(target.device)}
        for name, folder in self.trained.items():
            speculators[name] = load_speculator(folder, target)
        rows = []
        for name, speculator in speculators.items():
            streams = norms(target, speculator, samples, of_streams=True)
            main = norms(target, speculator, samples, of_streams=False)
            for layer, (stream, own) in enumerate(zip(streams, main, strict=True)):
                rows.append(
                    {"when": name, "layer": layer, "streams' losses": stream, "main loss": own}
                )
        title = "Gradient norm of each layer's MLP (Figure 6)"
        return Findings(title, rows, lambda figure: _draw(figure, rows))


def norms(
    target: Target, speculator: StreamingSpeculator, samples: list[Sample], of_streams: bool
) -> list[float]:
    """Per layer, the norm of the mean loss's gradient by the MLP's own weights."""
    adapted = speculator.adapted(target)
    weights = [
        [layer.get_submodule(name) for name in target.family.mlp_linears]
        for layer in adapted.family.layers
    ]
    tensors = [
        [getattr(module, "base_layer", module).weight for module in modules] for modules in weights
    ]
    sums = [[torch.zeros_like(tensor) for tensor in layer] for layer in tensors]
    alphas = torch.full((speculator.num_streams,), float(of_streams), device=target.device)
    for tensor in (tensor for layer in tensors for tensor in layer):
        tensor.requires_grad_(True)
    for sample in samples:
        batch = collate([sample]).to(target.device)
        loss = shared_losses(adapted, speculator, batch, float(not of_streams), alphas, None)
        flat = [tensor for layer in tensors for tensor in layer]
        found = iter(torch.autograd.grad(loss.total, flat, allow_unused=True))
        for layer in sums:
            for total in layer:
                gradient = next(found)
                if gradient is not None:
                    total += gradient / len(samples)
    for tensor in (tensor for layer in tensors for tensor in layer):
        tensor.requires_grad_(False)
    return [
        float(torch.stack([total.square().sum() for total in layer]).sum().sqrt()) for layer in sums
    ]


def _draw(figure, rows: list[dict]) -> None:
    axes = figure.subplots()
    for name in dict.fromkeys(row["when"] for row in rows):
        chosen = [row for row in rows if row["when"] == name]
        layers = [row["layer"] for row in chosen]
        line = axes.plot(
            layers, [row["streams' losses"] for row in chosen], marker="o", label=f"streams, {name}"
        )
        axes.plot(
            layers,
            [row["main loss"] for row in chosen],
            marker="x",
            linestyle="--",
            color=line[0].get_color(),
            label=f"main stream, {name}",
        )
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("gradient norm of the MLP's weights")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
