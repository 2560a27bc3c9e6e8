"""What pruning keeps: calibrated on some prompts, tried on others (section 2.3)."""

from dataclasses import asdict

from slipstream.data.rendering import render_prompt
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.prompts import Prompt, divided
from slipstream.results.record import Plot, Result
from slipstream.targets.target import Target
from studies.pruning_calibration import calibrate, outcome, record_trees


def pruning(
    target: Target,
    prompts: list[Prompt],
    drafter: Streaming,
    budget: int,
    calibration_prompts: int,
    keep: list[float],
) -> Result:
    """The first `calibration_prompts` choose threshold and cap, the others test them. keep: which
    share of accepted drafts must survive; looser and stricter ones are shown beside it."""
    parts = divided(prompts, calibration_prompts)
    ids = [[render_prompt(target.tokenizer, each.text) for each in part] for part in parts]
    trees, held_out = (record_trees(target, drafter, part, budget) for part in ids)
    rows = []
    for share in keep:
        found = calibrate(trees, share)
        tried = outcome(held_out, found.threshold, found.cap)
        rows += [
            {"asked for": share, "prompts": name, **asdict(each)}
            for name, each in (("calibrated on", found), ("held out", tried))
        ]
    plot = Plot("pruned", ("kept_drafts",), hue="prompts")
    return Result(f"Pruning trees of {budget} nodes", rows, (plot,))
