"""Answers of the target itself as training data: greedy or sampled, cached on disk, resumable.

A speculator learns to foresee what its target will write, so it is best trained on the target's own
answers. They are kept as token ids under a hash of target, prompts and settings; an interrupted run
goes on where it stopped.
"""

import json
import logging
from pathlib import Path

import torch
from tqdm import tqdm

from slipstream.core.files import appended, key_of
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import Sample
from slipstream.decoding.answer import Limits
from slipstream.decoding.plain import PlainDecoder
from slipstream.speculators.checkpoint import check_writable
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
    keep_unfinished: bool = False,
    field: str = "data.cache_dir",
) -> list[Sample]:
    """The target's answers to token-id `prompts`, as samples in the order given; where it samples,
    each prompt's seed is its place.

    Answers that do not end within `max_new_tokens` are left out (and counted in the log), or kept
    as far as they go: nothing follows their last token, so no end is learned.
    Raises `InputError` if answers are missing and the folder of config `field` cannot be written.
    """
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    settings = [str(target.dtype), max_new_tokens, str(sampling)]
    path = Path(cache_dir) / f"{key_of(target.fingerprint, settings, prompts)}.jsonl"
    answers = _read_answers(path)
    missing = [batch for batch in batches if not all(index in answers for index in batch)]
    if missing:
        check_writable(path.parent, field)
        decoder = PlainDecoder(target, sampling, Limits(max_new_tokens))
        with appended(path) as add, uncompiled(target), in_bfloat16(target):
            for batch in tqdm(missing, desc="regenerating"):
                found = decoder.generate_batch([prompts[index] for index in batch], batch)
                made = {index: answer.ids for index, answer in zip(batch, found, strict=True)}
                answers |= made
                add("\n".join(json.dumps(item) for item in made.items()))
    ended = [index for index in range(len(prompts)) if answers[index][-1] in target.end_ids]
    if len(ended) < len(prompts):
        done, count = "kept" if keep_unfinished else "left out", len(prompts) - len(ended)
        what = f"regenerated answers that did not end within {max_new_tokens} tokens"
        log.warning("%s %d of %d %s", done, count, len(prompts), what)
    chosen = range(len(prompts)) if keep_unfinished else ended
    return [Sample(prompts[index] + answers[index], len(prompts[index])) for index in chosen]


def in_bfloat16(target: Target) -> torch.autocast:
    """Within, a float32 target computes in bfloat16, which is twice as fast and good enough for
    texts to learn from; weights reordered for small batches know float32 alone."""
    lower = target.dtype == torch.float32 and not is_packed(target.model)
    return torch.autocast(target.device.type, torch.bfloat16, enabled=lower)


def _read_answers(path: Path) -> dict[int, list[int]]:
    """Finished answers; lines that an interruption cut off are passed over."""
    answers: dict[int, list[int]] = {}
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            index, answer = json.loads(line)
            answers[int(index)] = [int(token) for token in answer]
        except (ValueError, TypeError):
            continue
    return answers
