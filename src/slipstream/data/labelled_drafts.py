"""Drafted tokens with what the target thinks of them: what verifiers of drafts are trained on.

Texts of four kinds in equal parts (SPRINTER, section 3.2): the original text, completions by the
draft model, by the target, and by both in turns, drawn at random token by token. At positions of
these texts the draft model draws one more token x, and log q(x) / p(x) is noted. Positions are told
by lengths, so nothing is ever read from a pad position. Parts are written as they are done, under a
hash of both models, the texts and the settings, so an interrupted run goes on where it stopped.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from slipstream.core.errors import InputError
from slipstream.core.files import key_of, load_tensors, locked, save_tensors
from slipstream.core.sampling import draw
from slipstream.data.rendering import Sample
from slipstream.speculators.classifiers import DraftFeatures, shape_of
from slipstream.targets.loading import of_same_vocabulary
from slipstream.targets.packed import is_packed
from slipstream.targets.reading import CachedModel, read_on
from slipstream.targets.target import Target

log = logging.getLogger(__name__)

KINDS = {"text": None, "draft": 0.0, "target": 1.0, "both": 0.5}
"""Kinds of prefixes, and the share of their tokens that the target draws."""
HELD = 2**25
"""Logits of each model that are held at once while tokens are labelled: with what is made of them,
1 GiB at most for both models, whatever the vocabulary and the number of texts."""


@dataclass(frozen=True)
class LabelledDrafts:
    """n drafted tokens. hidden: (n, D) states of the draft model that they were drawn from, after
    the final norm; tokens: (n,); shapes: (n, 3) of `shape_of` the distribution q;
    log_probabilities: (n,) log q(x); log_ratios: (n,) log q(x) / p(x); prompts: (n,) which sample's
    prompt each follows; kinds: (n,) which of `KINDS`."""

    hidden: torch.Tensor
    tokens: torch.Tensor
    shapes: torch.Tensor
    log_probabilities: torch.Tensor
    log_ratios: torch.Tensor
    prompts: torch.Tensor
    kinds: torch.Tensor

    def features(self, features: DraftFeatures) -> torch.Tensor:
        """(n, F), on the draft model's device."""
        device = features.draft.device
        parts = self.hidden, self.tokens, self.shapes, self.log_probabilities
        return features(*(part.to(device) for part in parts))


def labelled_drafts(
    draft: Target,
    target: Target,
    samples: list[Sample],
    max_new_tokens: int,
    cache_dir: str | Path,
    seed: int,
    batch_size: int = 64,
) -> LabelledDrafts:
    """Label drafts on the texts of `samples`, and on completions of their prompts of up to
    `max_new_tokens` tokens. Samples that do not fit both models' contexts are left out. Raises
    `InputError` for models of different vocabularies, where no text has a second token to draft,
    and for a folder that cannot be written."""
    draft = of_same_vocabulary(draft, target, "training.draft")
    longest, count = min(draft.max_positions, target.max_positions), len(samples)
    samples = [sample for sample in samples if len(sample.ids) <= longest]
    if len(samples) < count:
        left_out = count - len(samples)
        log.warning("left out %d of %d texts of over %d tokens", left_out, count, longest)
    models = [[model.fingerprint, str(model.dtype)] for model in (draft, target)]
    texts = [[sample.ids, sample.prompt_length] for sample in samples]
    folder = Path(cache_dir) / key_of(models, texts, (max_new_tokens, seed, batch_size))
    starts = range(0, len(samples), batch_size)
    paths = {start: folder / f"part_{start // batch_size:05d}.pt" for start in starts}
    parts = {start: _opened(path) for start, path in paths.items()}
    # Processes share the parts: first each makes those that no other is making, then it waits.
    for wait in (False, True):
        missing = [start for start, part in parts.items() if part is None]
        for start in tqdm(missing, desc="labelling", disable=wait):
            with locked(paths[start].with_suffix(".lock"), "training.cache_dir", wait) as own:
                parts[start] = _opened(paths[start])
                if own and parts[start] is None:
                    generator = torch.Generator().manual_seed(seed + start)
                    given = draft, target, samples[start : start + batch_size], start
                    parts[start] = _labelled(*given, max_new_tokens, generator)
                    save_tensors(paths[start], parts[start])
    if not any(len(part["tokens"]) for part in parts.values()):
        raise InputError(
            "data: no text has a second token that could be drafted; give longer completions, or a "
            "larger data.max_new_tokens"
        )
    return LabelledDrafts(**_together([*parts.values()]))


def _together(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _opened(path: Path) -> dict[str, torch.Tensor] | None:
    """A part that was written before; None where there is none, a damaged one, or another thing.
    (The name of its folder says of what it is, and what is damaged has another checksum.)"""
    try:
        part = load_tensors(path)
    except OSError:
        return None
    names = LabelledDrafts.__dataclass_fields__.keys()
    return part if isinstance(part, dict) and part.keys() == names else None


@torch.inference_mode()
def _labelled(
    draft: Target,
    target: Target,
    samples: list[Sample],
    first: int,
    max_new_tokens: int,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    """The tensors of `LabelledDrafts` for a few samples; first: the number of the first one."""
    prompts = [sample.prompt for sample in samples]
    texts = {
        kind: complete(draft, target, prompts, share, max_new_tokens, generator)
        for kind, share in KINDS.items()
        if share is not None
    } | {"text": [sample.ids for sample in samples]}
    # The first token of an answer is the target's own: drafting begins with the second. Each
    # prompt has as many positions of every kind as its shortest text of any kind.
    parts = []
    for number, kind in enumerate(KINDS):
        rows, ends = [], []
        for place, prompt in enumerate(prompts):
            rooms = {each: len(texts[each][place]) - len(prompt) - 1 for each in KINDS}
            chosen = torch.randperm(rooms[kind], generator=generator)
            chosen = chosen[: max(0, min(rooms.values()))].sort().values
            rows += [place] * len(chosen)
            ends += (chosen + len(prompt)).tolist()
        part = judged(draft, target, texts[kind], rows, ends, generator)
        part["prompts"] = torch.tensor(rows, dtype=torch.long) + first
        part["kinds"] = torch.full((len(rows),), number)
        parts.append(part)
    return _together(parts)


def judged(
    draft: Target,
    target: Target,
    texts: list[list[int]],
    rows: list[int],
    ends: list[int],
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    """A token drawn by the draft model at each of n positions, with its features and log-ratio.

    rows: n numbers of texts; ends: the last token of each prefix, an index into that text.
    """
    ours, theirs = (states(model, texts)[rows, ends] for model in (draft, target))
    points = torch.rand(len(rows), dtype=torch.float64, generator=generator)
    count = max(1, HELD // draft.vocab_size)
    parts = [
        _drawn(draft.logits(own), target.logits(other), point)
        for own, other, point in zip(*(e.split(count) for e in (ours, theirs, points)), strict=True)
    ]
    return {"hidden": draft.norm(ours).float().cpu()} | _together(parts)


def _drawn(ours: torch.Tensor, theirs: torch.Tensor, points: torch.Tensor) -> dict:
    """A token drawn at each (n,) of `points` from the draft model's logits, (n, V), and what
    `LabelledDrafts` has of it; theirs: the target's logits, (n, V). All on the models' device."""
    ours, theirs = ours.float().log_softmax(-1), theirs.float().log_softmax(-1)
    tokens = draw(ours.exp(), points.to(ours.device))[:, None]
    own, other = ours.gather(1, tokens)[:, 0], theirs.gather(1, tokens.to(theirs.device))[:, 0]
    found = tokens[:, 0], shape_of(ours), own, own - other.to(own.device)
    names = ("tokens", "shapes", "log_probabilities", "log_ratios")
    return dict(zip(names, (each.cpu() for each in found), strict=True))


def complete(
    draft: Target,
    target: Target,
    prompts: list[list[int]],
    share: float,
    max_new_tokens: int,
    generator: torch.Generator,
) -> list[list[int]]:
    """Prompts with sampled completions, each token from the target with probability `share`, else
    from the draft model; up to an end token or `max_new_tokens` tokens."""
    models = (draft, target)
    texts = [list(prompt) for prompt in prompts]
    longest = min(model.max_positions for model in models)
    most = [min(longest, len(prompt) + max_new_tokens) for prompt in prompts]
    readers = [CachedModel(model, max(most), len(texts)) for model in models]
    going = list(range(len(texts)))
    while going:
        chosen = torch.rand(len(going), generator=generator) < share
        drawn: dict[int, int] = {}
        for model, reader, own in zip(models, readers, (~chosen, chosen), strict=True):
            drawing = own.nonzero()[:, 0].tolist()
            if not drawing:
                continue
            # bfloat16 is twice as fast, and good enough for texts to learn from; weights reordered
            # for small batches know float32 alone.
            lower = model.dtype == torch.float32 and not is_packed(model.model)
            with torch.autocast(model.device.type, torch.bfloat16, enabled=lower):
                hidden = reader.read(reader.unread([texts[place] for place in going]))
                logits = model.logits(hidden[drawing])
            points = torch.rand(len(drawing), dtype=torch.float64, generator=generator)
            tokens = draw(logits.float().softmax(-1), points.to(logits.device))
            drawn |= dict(zip(drawing, tokens.tolist(), strict=True))
        for place, token in drawn.items():
            texts[going[place]].append(token)
        kept = [
            place
            for place, number in enumerate(going)
            if texts[number][-1] not in target.end_ids and len(texts[number]) < most[number]
        ]
        if kept and len(kept) < len(going):
            for reader in readers:
                reader.keep(kept)
        going = [going[place] for place in kept]
    return texts


def states(model: Target, texts: list[list[int]]) -> torch.Tensor:
    """(B, T, D) states before the final norm of right-padded texts."""
    return read_on(model, texts, model.new_cache(max(map(len, texts)), len(texts))).hidden
