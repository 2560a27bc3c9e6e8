"""How well a verifier of drafts tells acceptable tokens from others, by task, on unseen prompts.

The prompts of the run and their references are labelled as in training (four kinds of prefixes);
neither training nor the choice of its best state has seen them. SPRINTER, Figures 3 and 9.
"""

import torch
from torchmetrics.functional.classification import binary_auroc

from slipstream.core.errors import InputError
from slipstream.data.labelled_drafts import labelled_drafts
from slipstream.data.rendering import render_sample
from slipstream.evaluation.comparison import ALL_SETS
from slipstream.speculators.checkpoint import load_speculator
from slipstream.training.verifier_curves import roc
from studies import Plot, Prompt, Result, Target


@torch.inference_mode()
def verifier(
    target: Target,
    prompts: list[Prompt],
    draft: Target,
    verifier: str,
    max_new_tokens: int,
    cache_dir: str,
    seed: int,
) -> Result:
    """Area under the ROC curve of `verifier` (a folder), for what `draft` drafts; max_new_tokens:
    of the completions that prefixes are taken from; cache_dir, seed: of the labels.

    Raises `InputError` for prompts without references.
    """
    if not all(prompt.references for prompt in prompts):
        raise InputError(
            "data: this study reads the prompts' references; give test files with data.path="
        )
    judge, judged, counts = load_speculator(verifier, draft), {}, {}
    for task in dict.fromkeys(prompt.source for prompt in prompts):
        samples = [
            render_sample(target.tokenizer, prompt.text, prompt.references[0])
            for prompt in prompts
            if prompt.source == task
        ]
        drafts = labelled_drafts(draft, target, samples, max_new_tokens, cache_dir, seed)
        probabilities = judge(drafts.features(judge.features)).sigmoid().cpu()
        judged[task] = probabilities, (judge.labels(drafts.log_ratios) >= 0.5).int()
        counts[task] = len(samples)
    if len(judged) > 1:
        judged[ALL_SETS] = tuple(map(torch.cat, zip(*judged.values(), strict=True)))
        counts[ALL_SETS] = len(prompts)
    rows, curves = [], []
    for task, (probabilities, labels) in judged.items():
        for name, *pair in zip(judge.outputs, probabilities.T, labels.T, strict=True):
            rows.append(
                {
                    "task": task,
                    "label": name,
                    "prompts": counts[task],
                    "drafted tokens": len(labels),
                    "acceptable, %": 100 * pair[1].float().mean().item(),
                    "AUROC": binary_auroc(*pair).item(),
                }
            )
        points = roc(judge.outputs, probabilities, labels)
        curves += [{"task": task} | point for point in points]
    shown = {"Verifier of drafts": rows}
    plot = Plot("false positive rate", ("true positive rate",), "label", "task", table="ROC")
    return Result("Verifier of drafts", rows, (plot,), {"ROC": curves}, shown)
