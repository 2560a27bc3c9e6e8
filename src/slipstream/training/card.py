"""The model card of what was trained: how it was made, and how it is opened and used."""

import re
import shlex
from pathlib import Path

import lightning as L
from hydra.core.hydra_config import HydraConfig

from slipstream.core.templates import FIELD
from slipstream.targets.target import Target

SPECULATOR = """---
library_name: slipstream
pipeline_tag: text-generation
tags: [speculative-decoding]
{base}---
{card}{tau}- target: {name}, for which alone it is; {writes}
- limits: trained on up to {longest} tokens; for prompts unlike its data drafts are worse, and \
never change an answer; speed depends on the device and was not measured in training: \
`{command}` does, beside plain decoding

```python
import slipstream  # THIS: this folder, or its hub id; TARGET, ADAPTER: the target's{template}
from slipstream.targets.loading import load_target

target = load_target({arguments})
print(slipstream.generate("...", target, THIS).text)
model.generate(ids, custom_generate=THIS, trust_remote_code=True)  # of transformers
```
"""
TAU = """- tau: tokens per forward of the target (plain decoding has 1), counted while it decoded \
{prompts} validation prompts, evenly spread over them, greedy, with trees of {budget} nodes
"""


def card(module: L.LightningModule, config: dict, trainer: L.Trainer, score) -> str:
    """What every run can tell. score: of the best state, if one was measured."""
    data = config["data"]
    paths = [data["path"]] if isinstance(data["path"], str) else data["path"] or []
    # without the folders of this machine
    names = [Path(path).name for path in paths]
    names = names or [source["name"] for source in (data["hub"] or {}).values()]
    text = f"# {module.title}\n\n{module.description}\n\n"
    text += f"- data: {', '.join(names or data['synthetic_kinds'])}"
    text += ", answered by the target itself" if data["regenerate"] else ""
    if data["generated_rows"]:
        kinds = " and ".join(data["synthetic_kinds"])
        text += f", and {data['generated_rows']:,} generated prompts ({kinds}), sampled answers"
    if given := overrides():
        text += f"\n- command: `{shlex.join(['python', 'train.py', *given])}`"
    text += f"\n- steps: {trainer.global_step}, seconds: {module.training_seconds:.0f}\n"
    if score is not None:
        monitored = trainer.checkpoint_callback.monitor.replace("/", " ")
        text += f"- {monitored}: {float(score):.3f}\n"
    return text


def speculator_card(module: L.LightningModule, text: str) -> str:
    """`text` with what the hub reads at its head, what its numbers mean, use and limits."""
    target = module.target
    here = Path(target.name).is_dir()
    hub = not here and re.fullmatch(r"(?!slipstream/)[\w.-]+/[\w.-]+", target.name)
    writes = "its weights and its output stay what they are"
    if module.shared:
        writes = "what they write together is no longer that model's output"
    tau = ""
    if "- validation tau: " in text:
        measured = min(module.validation_prompts, len(module.data.samples["validation"]))
        tau = TAU.format(prompts=measured, budget=module.validation_budget)
    own = getattr(target.tokenizer, "own_template", False)
    given = [each for each in overrides() if each.startswith("hydra.searchpath=")]
    given += target_overrides(target)
    given += [f"drafter={module.speculator.kind}", "speculator_path=THIS"]
    return SPECULATOR.format(
        base=f"base_model: {target.name}\n" if hub else "",
        card=text,
        tau=tau,
        name=Path(target.name).name if here else target.name,  # without the machine's folders
        writes=writes,
        longest=module.data.longest,
        command=shlex.join(["python", "infer.py", *given]),
        template="\n# TEMPLATE: that of config.json there, not the target's own" if own else "",
        arguments=target_arguments(target),
    )


def overrides() -> list[str]:
    """The overrides that this process was started with, without folders of this machine, none where
    there was no command."""
    if not HydraConfig.initialized():
        return []
    own = HydraConfig.get().overrides
    found = [each for each in own.hydra if each.startswith("hydra.searchpath=")] + [*own.task]
    return [re.sub(r"(?<=[=\[,'\"])(file://)?/(?:[^/,\]\s]+/)*", r"\1", each) for each in found]


def target_overrides(target: Target) -> list[str]:
    """With which `infer.py` opens the target as this run did."""
    choice = "hub"
    if HydraConfig.initialized():
        choice = HydraConfig.get().runtime.choices.get("target", choice)
    own = [each for each in overrides() if each.lstrip("+").startswith("target.")]
    places = tuple(f"target.{name}=" for name in ("name", "device", "packed", "adapter"))
    kept = [each for each in own if not each.lstrip("+").startswith(places)]
    adapter = ["target.adapter=ADAPTER"] * bool(target.loading.get("adapter"))
    return [f"target={choice}", "target.name=TARGET", *kept, *adapter]


def target_arguments(target: Target) -> str:
    """The arguments of `load_target` that open the target as this run did."""
    dtype = str(target.dtype).removeprefix("torch.")
    words = ["TARGET", f'"{dtype}"']
    if getattr(target.tokenizer, "own_template", False):
        words.append("chat_template=TEMPLATE")
    told = {name: getattr(target.tokenizer, name, None) for name in (FIELD, "reads_markers")}
    told |= {"quantization": target.loading.get("quantization")}
    words += ["adapter=ADAPTER"] * bool(target.loading.get("adapter"))
    return ", ".join([*words, *(f"{name}={value!r}" for name, value in told.items() if value)])
