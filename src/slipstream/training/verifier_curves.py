"""Curves of a classifier of drafted tokens, on tokens it was not trained on: ROC, calibration, and
eta_TP and eta_FP by decision threshold (SPRINTER, Figures 3 and 9). verifier.png, verifier.json.
"""

from pathlib import Path

import torch
from torchmetrics.functional.classification import binary_auroc, binary_roc

from slipstream.core.files import write_json
from slipstream.results.picture import draw
from slipstream.results.record import Plot, Result, Rows

LABEL = "label"
NUM_BINS = 10
POINTS = 100
"""Most points of each ROC curve that are drawn."""
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
            "predicted": probabilities[own].mean().item(),
            "acceptable": labels[own].mean().item(),
            "tokens": int(own.sum()),
        }
        for own in (bins == number for number in bins.unique())
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
        for name, predicted, own in zip(outputs, probabilities.T, labels.T, strict=True)
    }
    record, picture = folder / "verifier.json", folder / "verifier.png"
    write_json(record, found)
    tables = {"ROC": roc(outputs, probabilities, labels)}
    for title in ("calibration", "rates"):
        tables[title] = [{LABEL: name} | row for name in found for row in found[name][title]]
    kept = "true_positive_rate", "false_positive_rate"
    plots = (
        Plot("false positive rate", ("true positive rate",), LABEL, table="ROC"),
        Plot("predicted", ("acceptable",), LABEL, table="calibration"),
        Plot("threshold", (kept,), LABEL, table="rates"),
    )
    draw(picture, Result("Classifier of drafted tokens", [], plots, tables))
    return [picture, record]


def roc(outputs: list[str], probabilities: torch.Tensor, labels: torch.Tensor) -> Rows:
    """Points of the ROC curve of each output, at most `POINTS`; both (n, outputs)."""
    rows = []
    for name, predicted, own in zip(outputs, probabilities.T, labels.T, strict=True):
        false, true, _ = binary_roc(predicted, (own >= 0.5).int())
        kept = torch.linspace(0, len(false) - 1, min(POINTS, len(false))).long()
        rows += [
            {LABEL: name, "false positive rate": across, "true positive rate": up}
            for across, up in zip(false[kept].tolist(), true[kept].tolist(), strict=True)
        ]
    return rows
