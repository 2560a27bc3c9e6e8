"""The folder of a speculator in transformers' own `generate` beside `slipstream.generate`: the same
ids, as fast?"""

import time

import torch
from transformers import AutoModelForCausalLM

from slipstream import generate
from slipstream.assets import locate
from slipstream.core.settings import Count, Text
from slipstream.evaluation.metrics import ratio_interval
from slipstream.targets.packed import is_packed
from studies import Plot, Prompt, Result, Rows, Target
from studies.decoding import task_sets, token_ids


def custom_generate(
    target: Target, prompts: list[Prompt], speculator: Text, max_new_tokens: Count, repeats: Count
) -> Result:
    """Both answer each prompt in turn, greedy, `repeats` times after once unmeasured, each over a
    copy of the target. Rates are tokens a second of whole calls; the interval of the ratio is
    over prompts."""
    folder, name = str(locate(speculator)), str(locate(target.name))
    model = AutoModelForCausalLM.from_pretrained(name, dtype=target.dtype).to(target.device)
    seconds: list[dict[str, float]] = []
    tokens, same = [], []
    for prompt, ids in zip(prompts, token_ids(target, prompts), strict=True):
        given = torch.tensor([ids], device=target.device)

        def theirs(given=given) -> list[int]:
            found = model.generate(
                given,
                custom_generate=folder,
                trust_remote_code=True,
                packed=is_packed(target.model),
                do_sample=False,
                max_new_tokens=max_new_tokens,
            )
            return found[0, given.shape[1] :].tolist()

        def ours(text=prompt.text) -> list[int]:
            return generate(text, target, folder, max_new_tokens=max_new_tokens).ids

        calls, own = {"custom_generate": theirs, "slipstream.generate": ours}, {}
        for turn in range(repeats + 1):
            answers = {}
            for name, call in calls.items():
                started = time.perf_counter()
                answers[name] = call()
                if turn:
                    own[name] = own.get(name, 0.0) + time.perf_counter() - started
        seconds.append(own)
        tokens.append(repeats * len(answers["slipstream.generate"]))
        same.append(answers["custom_generate"] == answers["slipstream.generate"])
    rows: Rows = []
    for task, indices in task_sets(prompts).items():
        count = [tokens[index] for index in indices]
        took = {name: [seconds[index][name] for index in indices] for name in seconds[0]}
        ratio, low, high = ratio_interval(
            (count, took["custom_generate"]), (count, took["slipstream.generate"])
        )
        rows.append(
            {
                "prompts": task,
                "identical": f"{sum(same[index] for index in indices)}/{len(indices)}",
                **{f"{name}, tokens/s": sum(count) / sum(own) for name, own in took.items()},
                "ratio": ratio,
                "low": low,
                "high": high,
            }
        )
    plot = Plot(
        "prompts", ("ratio",), kind="point", interval={"ratio": ("low", "high")}, reference=1.0
    )
    return Result("custom_generate beside slipstream.generate", rows, (plot,))
