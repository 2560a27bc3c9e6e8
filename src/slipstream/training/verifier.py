"""Training a small classifier of drafted tokens: SPRINTER's verifier, SpecDec++'s acceptance head.

Labels come from the models themselves (`data/labelled_drafts.py`); what a label is, the speculator
says. Binary cross-entropy, Adam; the area under the ROC curve on prompts that training never saw
decides which state is kept.
"""

import time
from dataclasses import replace
from pathlib import Path

import torch
from torchmetrics.classification import BinaryAUROC
from torchmetrics.functional.classification import binary_auroc, binary_roc

from slipstream.core.errors import InputError
from slipstream.core.files import key_of, write_json
from slipstream.core.settings import Count, NotNegative, Seed, Text
from slipstream.data.batches import RowBatches
from slipstream.data.labelled_drafts import LabelledDrafts, labelled_drafts
from slipstream.data.prompt_completion import PromptCompletionData
from slipstream.results.picture import draw
from slipstream.results.record import Plot, Result, Rows
from slipstream.speculators.base import SpeculatorConfig, new_speculator, speculator_class
from slipstream.speculators.checkpoint import save_speculator
from slipstream.speculators.classifiers import Classifier
from slipstream.targets.target import Target
from slipstream.training.module import TrainingModule
from slipstream.training.tracking import tracked

LABEL = "label"
NUM_BINS = 10
POINTS = 100
"""Most points of each ROC curve that are drawn."""
THRESHOLDS = [round(0.05 * step, 2) for step in range(1, 20)]


class VerifierTraining(TrainingModule):
    """Lightning module of classifiers of what `draft` drafts for `target`.

    batch_size: drafted tokens of a training batch; max_train_rows, max_validation_rows: rows of
    each source whose texts are labelled, where `data` does not set a smaller number; cache_dir:
    where labels are kept. They are made once for a pair of models, data and `seed`.
    """

    title = "Classifier of drafted tokens"
    checkpointed = "verifier."
    runs_target = False  # what it made was labelled before

    def __init__(
        self,
        target: Target,
        speculator: SpeculatorConfig,
        draft: Target,
        learning_rate: NotNegative,
        batch_size: Count,
        max_train_rows: Count | None,
        max_validation_rows: Count | None,
        cache_dir: Text,
        seed: Seed,
    ):
        super().__init__(learning_rate)
        if not issubclass(speculator_class(speculator.kind), Classifier):
            raise InputError(
                "speculator: this training needs a target, and speculator=sprinter or "
                "speculator=acceptance"
            )
        self.max_rows = {"train": max_train_rows, "validation": max_validation_rows}
        self.target, self.draft = target, draft
        self.verifier = new_speculator(draft, replace(speculator, judged=target.fingerprint))
        self.description = (
            f"Trained by Slipstream; kind {self.verifier.kind}, on what {draft.name} drafts for "
            f"{target.name}."
        )
        self.batch_size, self.cache_dir, self.seed = batch_size, cache_dir, seed
        self.aurocs = torch.nn.ModuleList(BinaryAUROC() for _ in self.verifier.outputs)

    def prepare(self, data: PromptCompletionData) -> None:
        """Label drafts on both splits; nothing of a training prompt is validated on."""
        data.limit_rows(self.max_rows)
        super().prepare(data)
        started = time.perf_counter()
        data.samples["validation"] = data.unseen
        if not data.samples["validation"]:
            raise InputError(
                "data: every validation prompt is also trained on; give other validation rows"
            )
        self.sets: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for split in ("train", "validation"):
            # Each split has random numbers of its own.
            settings = data.max_new_tokens, self.cache_dir, 2 * self.seed + (split == "train")
            drafts = labelled_drafts(self.draft, self.target, data.samples[split], *settings)
            with torch.no_grad():
                features = drafts.features(self.verifier.features).cpu()
            if split == "train":
                spread = features.std(0)
                self.register_buffer("mean", features.mean(0), persistent=False)
                self.register_buffer("scale", spread.where(spread > 1e-6, 1.0), persistent=False)
                found = key_of(self.mean.tolist(), self.scale.tolist())
                self.drafts = f"{len(features)} drafted tokens {found}"
            self.sets[split] = (features - self.mean) / self.scale, self._labels(drafts)
            data.loaders[split] = RowBatches(
                self.sets[split], self.batch_size, self.seed, shuffle=split == "train"
            )
        self._tell(time.perf_counter() - started)

    def _labels(self, drafts: LabelledDrafts) -> torch.Tensor:
        """(n, outputs); `InputError` unless each output has both kinds of labels."""
        labels = self.verifier.labels(drafts.log_ratios)
        for name, column in zip(self.verifier.outputs, labels.unbind(1), strict=True):
            share = (column >= 0.5).float().mean().item()
            if share in (0.0, 1.0):
                raise InputError(
                    f"data: all {len(column)} drafted tokens are {'un' if not share else ''}"
                    f"acceptable ({name}), so there is nothing to tell apart; give more rows, "
                    "another draft model or other speculator.ratios"
                )
        return labels

    def _tell(self, seconds: float) -> None:
        count = sum(parameter.numel() for parameter in self.verifier.parameters())
        train, other = (self.sets[split][1] for split in ("train", "validation"))
        positive = zip(self.verifier.outputs, (train >= 0.5).float().mean(0), strict=True)
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in positive)
        print(
            f"{self.verifier.kind}: {count:,} parameters; {len(train):,} drafted tokens to train "
            f"on, {len(other):,} of other prompts to validate on, labelled in {seconds:.0f} s; "
            f"acceptable: {shares}"
        )

    def losses(self, batch, seed: int | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, scores = self.verifier.losses(*batch)
        if seed is None:
            for place, auroc in enumerate(self.aurocs):
                auroc.update(scores[:, place].sigmoid(), (batch[1][:, place] >= 0.5).int())
        return loss, {"loss": loss}

    def num_trained_tokens(self, batch: list[torch.Tensor]) -> int:
        return len(batch[0])

    def on_validation_epoch_end(self) -> None:
        found = [auroc.compute() for auroc in self.aurocs]
        for name, value in zip(self.verifier.outputs, found, strict=True):
            self.log(f"validation/auroc_{name}", value)
        self.log("validation/auroc", torch.stack(found).mean(), prog_bar=True)
        for auroc in self.aurocs:
            auroc.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.verifier.parameters(), lr=self.learning_rate)

    @torch.no_grad()
    def save(self, folder: Path, card: str) -> None:
        """Write the speculator folder, and the curves of the validation set beside it."""
        self.to("cpu").float()
        features, labels = self.sets["validation"]
        paths = write_curves(
            folder.parent, self.verifier.outputs, self.verifier(features).sigmoid(), labels
        )
        for logger in tracked(self.loggers):
            logger.log_image("verifier", [str(paths[0])])
        self.verifier.fold_in(self.mean, self.scale)
        save_speculator(folder, self.verifier, self.draft, self.data.longest, card)
        print(f"curves: {', '.join(map(str, paths))}")


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
    """ROC, calibration, and eta_TP and eta_FP by decision threshold (SPRINTER, Figures 3 and 9), on
    tokens that training never saw. probabilities, labels: (n, outputs). Returns the paths of the
    picture and of the record."""
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
