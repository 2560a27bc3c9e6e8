"""How well a verifier of drafts tells acceptable tokens from others, by task, on unseen prompts.

The prompts of the run and their references are labelled as in training (four kinds of prefixes);
neither training nor the choice of its best state has seen them. SPRINTER, Figures 3 and 9.
"""

import torch
from torchmetrics.functional.classification import binary_auroc, binary_roc

from slipstream.core.errors import InputError
from slipstream.data.labelled_drafts import labelled_drafts
from slipstream.data.rendering import render_sample
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
        verifier, rows, curves = load_speculator(self.verifier, self.draft), [], {}
        for task in dict.fromkeys(prompt.source for prompt in prompts):
            samples = [
                render_sample(target.tokenizer, prompt.text, prompt.references[0])
                for prompt in prompts
                if prompt.source == task
            ]
            settings = self.max_new_tokens, self.cache_dir, self.seed
            drafts = labelled_drafts(self.draft, target, samples, *settings)
            probabilities = verifier(drafts.features(verifier.features)).sigmoid().cpu()
            labels = (verifier.labels(drafts.log_ratios) >= 0.5).int()
            for place, name in enumerate(verifier.outputs):
                pair = probabilities[:, place], labels[:, place]
                rows.append(
                    {
                        "task": task,
                        "label": name,
                        "prompts": len(samples),
                        "drafted tokens": len(drafts),
                        "acceptable, %": 100 * pair[1].float().mean().item(),
                        "AUROC": binary_auroc(*pair).item(),
                    }
                )
                curves[task, name] = binary_roc(*pair)[:2]
        return Findings("Verifier of drafts", rows, lambda figure: _draw(figure, curves))


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
