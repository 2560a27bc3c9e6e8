"""Corpora that drafts are retrieved from: texts in a target's tokens, sorted once, kept on disk,
and found again by a hash of tokenizer, texts and settings."""

import logging
from pathlib import Path

import torch
from tqdm import tqdm

from slipstream.core.errors import InputError
from slipstream.core.files import SUMS, key_of, locked, replaced_folder
from slipstream.core.settings import Count, PositiveShare, Seed, Text
from slipstream.data.batches import TokenBatches
from slipstream.data.regeneration import Regeneration
from slipstream.data.rendering import Sample, render_sample
from slipstream.data.rows import read_rows, spread
from slipstream.data.sources import HubSets, Kinds, Paths, Sources
from slipstream.drafters.suffixes import SuffixStore
from slipstream.speculators.losses import completion_losses
from slipstream.targets.target import Target

log = logging.getLogger(__name__)

MAX_NEW_TOKENS = 96
"""Of the target's answers to generated prompts."""
BATCH_TOKENS = 2048
"""Tokens of the texts whose perplexity is measured together."""


class TrainingTexts:
    """Prompts with their completions, as the target would see them; of generated prompts with the
    target's own answers.

    path, hub, synthetic_kinds: as `Sources` has them; of `path` only folders that have a training
    split (others, and single files, may be what is decoded). max_rows: most rows of each source, or
    generated prompts. share: of the texts, those of least perplexity under the target stay
    (SPECTRA, section 3.2). cache_dir: where stores are kept.
    """

    def __init__(
        self,
        path: Paths,
        hub: HubSets,
        synthetic_kinds: Kinds,
        max_rows: Count | None,
        share: PositiveShare,
        cache_dir: Text,
        seed: Seed,
    ):
        self.sources = Sources(path, hub, synthetic_kinds, seed)
        self.max_rows, self.share = max_rows, share
        self.cache_dir = Path(cache_dir)

    def store(self, target: Target) -> SuffixStore:
        """The store of these texts; made and written if it is not there yet."""
        samples = self._samples(target)
        key = key_of(target.fingerprint, self.share, [sample.ids for sample in samples])
        folder = self.cache_dir / key
        if not (folder / SUMS).exists():
            if not samples:
                raise InputError(
                    "corpus: it has no text; raise corpus.max_rows, or name other data with "
                    "corpus.path"
                )
            with locked(self.cache_dir / f"{key}.lock", "corpus.cache_dir"):
                if not (folder / SUMS).exists():  # another process may have made it
                    kept = refined(samples, target, self.share)
                    log.info("sorting the suffixes of %d texts", len(kept))
                    with replaced_folder(folder) as made:
                        SuffixStore.of_texts([sample.ids for sample in kept]).save(made)
        return SuffixStore.open(folder, target.vocab_size)

    def _samples(self, target: Target) -> list[Sample]:
        if not self.sources.given:
            rows = self.sources.synthetic(self.max_rows, "train")
            prompts, folder = [row.prompt for row in rows], self.cache_dir / "answers"
            given = target, target.tokenizer, prompts, MAX_NEW_TOKENS, folder
            return Regeneration().samples(*given, seed=0, field="corpus.cache_dir")
        folders = [Path(path) for path in self.sources.paths]
        training = [folder for folder in folders if any(folder.glob("train.jsonl*"))]
        if folders and not training:
            raise InputError(
                "corpus.path: no folder here has a training split (train.jsonl) to retrieve from; "
                "give one, or leave out what retrieves"
            )
        tables = [read_rows(path, "train") for path in training] or self.sources.tables("train")
        rows = [row for table in tables for row in spread(table, self.max_rows)]
        return [render_sample(target.tokenizer, row.prompt, row.completion) for row in rows]


def refined(samples: list[Sample], target: Target, share: float) -> list[Sample]:
    """The share of the texts whose completions have the least perplexity under the target, in the
    order given; those that do not fit its context have none."""
    if share == 1:
        return samples
    samples = [sample for sample in samples if len(sample.ids) <= target.max_positions]
    if not samples:
        raise InputError(
            f"corpus: no text fits the target's context of {target.max_positions} tokens, so none "
            "has a perplexity; give shorter ones, or corpus.share=1"
        )
    worth = perplexities(samples, target)
    kept = sorted(range(len(samples)), key=worth.__getitem__)[: max(1, round(share * len(samples)))]
    return [samples[place] for place in sorted(kept)]


@torch.inference_mode()
def perplexities(samples: list[Sample], target: Target) -> list[float]:
    """Of each completion, given its prompt: exp of the mean negative log-probability."""
    batches, found = TokenBatches(samples, BATCH_TOKENS, 0, shuffle=False), [0.0] * len(samples)
    for places in tqdm(batches.order(torch.Generator(), processes=1), "perplexity"):
        batch = batches.batch(places).to(target.device)
        counts = batch.supervised[:, 1:].sum(1).tolist()
        losses = completion_losses(target, batch).split(counts)
        for place, own in zip(places, losses, strict=True):
            found[place] = own.mean().exp().item() if len(own) else float("inf")
    return found
