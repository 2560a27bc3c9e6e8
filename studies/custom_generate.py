"""The folder of a speculator in transformers' own `generate` beside `slipstream.generate`: the same
ids, as fast?"""

import time
from itertools import product

import torch
from transformers import AutoModelForCausalLM

from slipstream import generate
from slipstream.assets import locate
from slipstream.core.settings import Count, Text
from slipstream.evaluation.comparison import task_sets
from slipstream.evaluation.metrics import ratio_interval
from slipstream.targets.packed import is_packed
from studies import Plot, Prompt, Result, Rows, Target
from studies.decoding import token_ids


def custom_generate(
    target: Target, prompts: list[Prompt], speculator: Text, max_new_tokens: Count, repeats: Count
) -> Result:
    """Both answer each prompt in turn, greedy, `repeats` times after once unmeasured, each over a
    copy of the target. Rates are tokens a second of whole calls; the interval of the ratio is
    over prompts."""
    folder, name = str(locate(speculator)), str(locate(target.name))
    model = AutoModelForCausalLM.from_pretrained(name, dtype=target.dtype).to(target.device)

    def theirs(_: str, given: torch.Tensor) -> list[int]:
        found = model.generate(
            given,
            custom_generate=folder,
            trust_remote_code=True,
            packed=is_packed(target.model),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        return found[0, given.shape[1] :].tolist()

    def ours(text: str, _: torch.Tensor) -> list[int]:
        return generate(text, target, folder, max_new_tokens=max_new_tokens).ids

    calls = {"custom_generate": theirs, "slipstream.generate": ours}
    seconds = {name: [0.0] * len(prompts) for name in calls}
    tokens, same = [], []
    for place, (prompt, ids) in enumerate(zip(prompts, token_ids(target, prompts), strict=True)):
        given, answers = torch.tensor([ids], device=target.device), {}
        for turn, (name, call) in product(range(repeats + 1), calls.items()):
            started = time.perf_counter()
            answers[name] = call(prompt.text, given)
            if turn:
                seconds[name][place] += time.perf_counter() - started
        tokens.append(repeats * len(answers["slipstream.generate"]))
        same.append(answers["custom_generate"] == answers["slipstream.generate"])
    rows: Rows = []
    for task, indices in task_sets(prompts).items():
        count = [tokens[index] for index in indices]
        took = {name: [own[index] for index in indices] for name, own in seconds.items()}
        sides = [(count, own) for own in took.values()]
        rows.append(
            {
                "prompts": task,
                "identical": f"{sum(same[index] for index in indices)}/{len(indices)}",
                **{f"{name}, tokens/s": sum(count) / sum(own) for name, own in took.items()},
                **dict(zip(("ratio", "low", "high"), ratio_interval(*sides), strict=True)),
            }
        )
    plot = Plot(
        "prompts", ("ratio",), kind="point", interval={"ratio": ("low", "high")}, reference=1.0
    )
    return Result("custom_generate beside slipstream.generate", rows, (plot,))
