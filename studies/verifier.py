"""How well a verifier of drafts tells acceptable tokens from others, by task, on unseen prompts.

The prompts of the run and their references are labelled as in training (four kinds of prefixes);
neither training nor the choice of its best state has seen them. SPRINTER, Figures 3 and 9.
"""

import torch
from torchmetrics.functional.classification import binary_auroc

from slipstream.core.errors import InputError
from slipstream.core.settings import Count, Seed, Text
from slipstream.data.labelled_drafts import labelled_drafts
from slipstream.data.rendering import render_sample
from slipstream.evaluation.comparison import ALL_SETS, task_sets
from slipstream.speculators.checkpoint import load_speculator
from slipstream.training.verifier import roc
from studies import Plot, Prompt, Result, Target


@torch.inference_mode()
def verifier(
    target: Target,
    prompts: list[Prompt],
    draft: Target,
    verifier: Text,
    max_new_tokens: Count,
    cache_dir: Text,
    seed: Seed,
) -> Result:
    """Area under the ROC curve of `verifier` (a folder), for what `draft` drafts; max_new_tokens:
    of the completions that prefixes are taken from; cache_dir, seed: of the labels.

    Raises `InputError` for prompts without references.
    """
    if not all(prompt.references for prompt in prompts):
        raise InputError(
            "data: this study reads the prompts' references; give test files with data.path="
        )
    judge, judged, sets = load_speculator(verifier, draft), {}, task_sets(prompts)
    samples = [render_sample(target.tokenizer, p.text, p.references[0]) for p in prompts]
    for task in dict.fromkeys(prompt.source for prompt in prompts):
        own = [samples[index] for index in sets[task]]
        drafts = labelled_drafts(draft, target, own, max_new_tokens, cache_dir, seed)
        probabilities = judge(drafts.features(judge.features)).sigmoid().cpu()
        judged[task] = probabilities, (judge.labels(drafts.log_ratios) >= 0.5).int()
    if len(judged) > 1:
        judged[ALL_SETS] = tuple(map(torch.cat, zip(*judged.values(), strict=True)))
    rows, curves = [], []
    for task, (probabilities, labels) in judged.items():
        for name, *pair in zip(judge.outputs, probabilities.T, labels.T, strict=True):
            rows.append(
                {
                    "task": task,
                    "label": name,
                    "prompts": len(sets[task]),
                    "drafted tokens": len(labels),
                    "acceptable, %": 100 * pair[1].float().mean().item(),
                    "AUROC": binary_auroc(*pair).item() if len(pair[1].unique()) > 1 else None,
                }
            )
        curves += [{"task": task} | p for p in roc(judge.outputs, probabilities, labels)]
    shown = {"Verifier of drafts": rows}
    plot = Plot("false positive rate", ("true positive rate",), "label", "task", table="ROC")
    return Result("Verifier of drafts", rows, (plot,), {"ROC": curves}, shown)
