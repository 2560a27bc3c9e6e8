"""How well a verifier of drafts tells acceptable tokens from others, by task, on unseen prompts.

The prompts of the run and their references are labelled as in training (four kinds of prefixes);
neither training nor the choice of its best state has seen them. SPRINTER, Figures 3 and 9.
"""

import torch
from torch import nn
from torchmetrics.functional.classification import binary_auroc, binary_roc

from slipstream.core.errors import InputError
from slipstream.data.labelled_drafts import labelled_drafts
from slipstream.data.rendering import render_sample
from slipstream.evaluation.comparison import ALL_SETS
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.studies.findings import Findings
from slipstream.speculators.checkpoint import load_speculator
from slipstream.targets.target import Target


class VerifierStudy:
    """Area under the ROC curve of `verifier` (a folder), for what `draft` drafts; max_new_tokens:
    of the completions that prefixes are taken from; cache_dir, seed: of the labels.

    Raises `InputError` for prompts without references.
    """

    def __init__(
        self, draft: Target, verifier: str, max_new_tokens: int, cache_dir: str, seed: int
    ):
        self.draft, self.verifier = draft, verifier
        self.max_new_tokens, self.cache_dir, self.seed = max_new_tokens, cache_dir, seed

    @torch.inference_mode()
    def run(self, target: Target, prompts: list[Prompt]) -> Findings:
        if not all(prompt.references for prompt in prompts):
            raise InputError(
                "data: this study reads the prompts' references; give test files with data.path="
            )
        verifier = load_speculator(self.verifier, self.draft)
        judged = {
            task: self._judged(verifier, target, [p for p in prompts if p.source == task])
            for task in dict.fromkeys(prompt.source for prompt in prompts)
        }
        if len(judged) > 1:
            columns = zip(*judged.values(), strict=True)
            judged[ALL_SETS] = tuple(torch.cat(column) for column in columns)
        rows, curves = [], {}
        for task, (probabilities, labels) in judged.items():
            for place, name in enumerate(verifier.outputs):
                pair = probabilities[:, place], labels[:, place]
                rows.append(
                    {
                        "task": task,
                        "label": name,
                        "prompts": sum(task in (ALL_SETS, prompt.source) for prompt in prompts),
                        "drafted tokens": len(labels),
                        "acceptable, %": 100 * pair[1].float().mean().item(),
                        "AUROC": binary_auroc(*pair).item(),
                    }
                )
                curves[task, name] = binary_roc(*pair)[:2]
        return Findings("Verifier of drafts", rows, lambda figure: _draw(figure, curves))

    def _judged(
        self, verifier: nn.Module, target: Target, prompts: list[Prompt]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of n drafted tokens how probably each is acceptable, and whether it is, by lambda:
        (n, outputs) each."""
        samples = [
            render_sample(target.tokenizer, prompt.text, prompt.references[0]) for prompt in prompts
        ]
        settings = self.max_new_tokens, self.cache_dir, self.seed
        drafts = labelled_drafts(self.draft, target, samples, *settings)
        probabilities = verifier(drafts.features(verifier.features)).sigmoid().cpu()
        return probabilities, (verifier.labels(drafts.log_ratios) >= 0.5).int()


def _draw(figure, curves: dict) -> None:
    tasks = list(dict.fromkeys(task for task, _ in curves))
    for part, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for (own, name), (false, true) in curves.items():
            if own == task:
                part.plot(false, true, label=name.replace("lambda_", "λ = "))
        part.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        part.set(title=task, xlabel="false positive rate", ylabel="true positive rate")
        part.spines[["top", "right"]].set_visible(False)
        part.legend(fontsize=8)
