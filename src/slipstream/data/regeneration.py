"""Answers of the target itself as training data: greedy or sampled, cached on disk, resumable.

A speculator learns to foresee what its target will write, so it is best trained on the target's own
answers. They are kept as token ids under a hash of target, prompts and settings; an interrupted run
goes on where it stopped.
"""

import hashlib
import json
import logging
from pathlib import Path

import torch
from tqdm import tqdm

from slipstream.core.sampling import Sampling
from slipstream.data.rendering import Sample
from slipstream.decoding.answer import Limits
from slipstream.decoding.plain import PlainDecoder
from slipstream.targets.compiled import uncompiled
from slipstream.targets.packed import is_packed
from slipstream.targets.target import Target

log = logging.getLogger(__name__)


def regenerate(
    target: Target,
    prompts: list[list[int]],
    max_new_tokens: int,
    cache_dir: str | Path,
    sampling: Sampling,
    batch_size: int = 64,
) -> list[Sample]:
    """The target's answers to token-id `prompts`, as samples in the order given; where it samples,
    each prompt's seed is its place.

    A float32 target answers in bfloat16 arithmetic, which is twice as fast and good enough to
    learn from; weights reordered for small batches know float32 alone.
    Answers that do not end within `max_new_tokens` are left out (and counted in the log).
    """
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    decoder = PlainDecoder(target, sampling, Limits(max_new_tokens))
    lower = target.dtype == torch.float32 and not is_packed(target.model)
    path = Path(cache_dir) / f"{_key(target, prompts, max_new_tokens, sampling)}.jsonl"
    answers = _read_answers(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, uncompiled(target):
        for batch in tqdm(batches, desc="regenerating", disable=len(answers) == len(prompts)):
            if all(index in answers for index in batch):
                continue
            with torch.autocast(target.device.type, torch.bfloat16, enabled=lower):
                found = decoder.generate_batch([prompts[index] for index in batch], batch)
            for index, answer in zip(batch, found, strict=True):
                answers[index] = answer.ids
                file.write(json.dumps([index, answer.ids]) + "\n")
            file.flush()
    ended = [index for index in range(len(prompts)) if answers[index][-1] in target.end_ids]
    if len(ended) < len(prompts):
        log.warning(
            "left out %d of %d regenerated answers that did not end within %d tokens",
            len(prompts) - len(ended),
            len(prompts),
            max_new_tokens,
        )
    return [Sample(prompts[index] + answers[index], len(prompts[index])) for index in ended]


def _key(target: Target, prompts: list[list[int]], max_new_tokens: int, sampling: Sampling) -> str:
    settings = [str(target.dtype), max_new_tokens, str(sampling)]
    content = json.dumps([target.fingerprint, settings, prompts])
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def _read_answers(path: Path) -> dict[int, list[int]]:
    """Finished answers; a last line cut off by an interruption is removed."""
    answers: dict[int, list[int]] = {}
    if not path.exists():
        return answers
    whole = [
        line
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    ]
    for line in whole:
        index, answer = json.loads(line)
        answers[index] = answer
    path.write_text("".join(whole), encoding="utf-8")
    return answers
