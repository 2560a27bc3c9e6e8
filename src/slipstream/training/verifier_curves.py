"""Curves of a classifier of drafted tokens, on tokens it was not trained on: ROC, calibration, and
eta_TP and eta_FP by decision threshold (SPRINTER, Figures 3 and 9). verifier.png, verifier.json.
"""

import json
from pathlib import Path

import torch
from torchmetrics.functional.classification import binary_auroc, binary_roc

NUM_BINS = 10
THRESHOLDS = [round(0.05 * step, 2) for step in range(1, 20)]


def calibration(probabilities: torch.Tensor, labels: torch.Tensor) -> list[dict[str, float]]:
    """How often tokens are acceptable that are said to be so with some probability.

    Both (n,); NUM_BINS bins of equal width, empty ones left out. Each bin's mean prediction, mean
    label and count: predictions 0.12, 0.18 and 0.9 with labels 0, 1, 1 give (0.15, 0.5, 2) and
    (0.9, 1, 1).
    """
    bins = (probabilities * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    return [
        {
            "predicted": probabilities[bins == number].mean().item(),
            "acceptable": labels[bins == number].mean().item(),
            "tokens": int((bins == number).sum()),
        }
        for number in bins.unique().tolist()
    ]


def rates(probabilities: torch.Tensor, labels: torch.Tensor, threshold: float) -> dict[str, float]:
    """eta_TP and eta_FP, the shares of acceptable (label >= 0.5) and of other tokens that are kept,
    i.e. predicted with at least `threshold`."""
    kept, good = probabilities >= threshold, labels >= 0.5
    return {
        "threshold": threshold,
        "true_positive_rate": kept[good].float().mean().item(),
        "false_positive_rate": kept[~good].float().mean().item(),
    }


def write_curves(
    folder: Path, outputs: list[str], probabilities: torch.Tensor, labels: torch.Tensor
) -> list[Path]:
    """probabilities, labels: (n, outputs). Returns the picture's path and the record's."""
    found = {
        name: {
            "auroc": binary_auroc(predicted, (own >= 0.5).int()).item(),
            "tokens": len(own),
            "acceptable": (own >= 0.5).float().mean().item(),
            "calibration": calibration(predicted, own),
            "rates": [rates(predicted, own, threshold) for threshold in THRESHOLDS],
        }
        for name, predicted, own in zip(
            outputs, probabilities.unbind(1), labels.unbind(1), strict=True
        )
    }
    record, picture = folder / "verifier.json", folder / "verifier.png"
    record.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    _draw(picture, found, probabilities, labels)
    return [picture, record]


def _draw(path: Path, found: dict, probabilities: torch.Tensor, labels: torch.Tensor) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    for place, (name, own) in enumerate(found.items()):
        good = (labels[:, place] >= 0.5).int()
        false, true, _ = binary_roc(probabilities[:, place], good)
        label, colour = name.replace("lambda_", "λ = "), f"C{place}"
        axes[0].plot(false, true, color=colour, label=f"{label}: AUROC {own['auroc']:.3f}")
        bins = own["calibration"]
        axes[1].plot(
            [each["predicted"] for each in bins], [each["acceptable"] for each in bins], "o-",
            color=colour, label=label,
        )  # fmt: skip
        for kind, style in (("true", "-"), ("false", "--")):
            axes[2].plot(
                THRESHOLDS, [each[f"{kind}_positive_rate"] for each in own["rates"]], style,
                color=colour, label=f"η_{kind[0].upper()}P, {label}",
            )  # fmt: skip
    titles = (
        ("ROC", "false positive rate", "true positive rate"),
        ("calibration", "predicted probability", "share of acceptable tokens"),
        ("kept at a decision threshold", "decision threshold", "share of tokens kept"),
    )
    for part, (title, across, up) in zip(axes, titles, strict=True):
        part.set(title=title, xlabel=across, ylabel=up, xlim=(0, 1), ylim=(0, 1.02))
        part.spines[["top", "right"]].set_visible(False)
        part.legend(fontsize=7)
    for part in axes[:2]:
        part.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
