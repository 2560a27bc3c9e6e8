"""The Lightning data module for prompt/completion data.

Completions are the given ones or the target's own answers. It serves batches and knows no
speculator.
"""

import logging
from dataclasses import replace

import lightning as L

from slipstream.core.errors import InputError, enough_memory, naming
from slipstream.core.processes import num_processes
from slipstream.core.settings import Amount, Count, Seed, Text, set_to
from slipstream.data.batches import TokenBatches
from slipstream.data.regeneration import Regeneration
from slipstream.data.rendering import TRAINING, Sample, check_generation_markers, render_sample
from slipstream.data.rows import Row, by_prompt, messages_of, named, spread
from slipstream.data.sources import HubSets, Kinds, Paths, Sources, copying_rows
from slipstream.decoding.answer import check_known
from slipstream.targets.target import Target

log = logging.getLogger(__name__)


class PromptCompletionData(L.LightningDataModule):
    """Prompt/completion rows of one or several sources.

    path, hub, synthetic_kinds: as `Sources` has them. max_train_rows, max_validation_rows: most
    rows of each source (spread evenly over it), or the count of shipped prompts. copying_rows: how
    many rows that ask for a text to be repeated are added to the training split. generated_rows:
    how many shipped prompts (of synthetic_kinds) are added to it, with answers that the target
    samples at temperature 1; a twentieth as many to the validation split.
    max_length: longer samples, and those beyond the target's context, are dropped, counted and
    reported. batch_tokens: padded tokens of a batch. regenerate: take the target's own answers, of
    up to max_new_tokens tokens, kept in cache_dir; of conversations to each question in turn.
    regeneration: how they are made.
    """

    def __init__(
        self,
        path: Paths,
        hub: HubSets,
        synthetic_kinds: Kinds,
        max_train_rows: Count | None,
        max_validation_rows: Count | None,
        copying_rows: Amount,
        generated_rows: Amount,
        max_length: Count,
        batch_tokens: Count,
        regenerate: bool,
        regeneration: Regeneration,
        max_new_tokens: Count,
        cache_dir: Text,
        seed: Seed,
    ):
        super().__init__()
        self.sources = Sources(path, hub, synthetic_kinds, seed)
        self.max_rows = {"train": max_train_rows, "validation": max_validation_rows}
        self.copying_rows = copying_rows
        self.generated_rows = {"train": generated_rows, "validation": generated_rows // 20}
        self.max_length, self.batch_tokens, self.seed = max_length, batch_tokens, seed
        self.regenerate, self.regeneration = regenerate, regeneration
        self.max_new_tokens, self.cache_dir = max_new_tokens, cache_dir
        self.tokenizer = None
        # Whether each answer of a conversation is a sample of its own: the training says so.
        self.one_answer = False
        self.samples: dict[str, list[Sample]] = {}
        self.loaders: dict[str, TokenBatches] = {}

    def limit_rows(self, most: dict[str, int | None]) -> None:
        """Take no more rows of each source (or generated prompts) than `most` says, by split."""
        for split, count in most.items():
            known = [number for number in (self.max_rows[split], count) if number is not None]
            self.max_rows[split] = min(known, default=None)

    def rows(self, split: str) -> list[Row]:
        """The rows of `split` ('train' or 'validation'); prompts to be answered come once each."""
        cap = self.max_rows[split]
        if not self.sources.given:
            rows = self.sources.synthetic(cap, split)
        else:
            tables = self.sources.tables(split, completion_required=not self.regenerate)
            if self.regenerate:
                tables = [[own[-1] for own in by_prompt(table)] for table in tables]
            rows = [row for table in tables for row in spread(table, cap)]
            if len(rows) < (given := sum(map(len, tables))):
                most = f"data.max_{split}_rows={cap}"
                log.warning("took %d of %d %s rows (%s)", len(rows), given, split, most)
        if split == "train":
            rows += copying_rows(rows, self.copying_rows, self.seed)
        return rows

    @set_to(TRAINING, True)
    def prepare(self, tokenizer, target: Target | None = None) -> None:
        """Render both splits; must be called before training. `target` answers, if asked to."""
        self.tokenizer = tokenizer
        if target is not None:
            self.max_length = min(self.max_length, target.max_positions)
        for split in ("train", "validation"):
            rows = self.rows(split)
            if self.regenerate:
                samples = self._answered(rows, target, self.regeneration)
            else:
                # of the row of most messages: a template may render later turns in a way of its own
                row = max(rows, key=lambda row: len(messages_of(row.prompt)))
                with naming(named(row.prompt)):
                    check_generation_markers(tokenizer, row.prompt, row.completion)
                samples = []
                for row in rows:
                    with naming(named(row.prompt)):
                        samples.append(render_sample(tokenizer, row.prompt, row.completion))
                        if target is not None and samples[-1].ids:
                            check_known(target, samples[-1].ids)
            if count := self.generated_rows[split]:
                more = self.sources.synthetic(count, split)
                sampled = replace(self.regeneration, temperature=1.0)
                samples += self._answered(more, target, sampled)
            self.samples[split] = self._usable(samples, split)
            self.loaders[split] = TokenBatches(
                self.samples[split], self.batch_tokens, self.seed, shuffle=split == "train"
            )
        count = len(self.samples["validation"])
        if known := count - len(self.unseen):
            log.warning(
                "%d of %d validation prompts are trained on as well: what validation says of them "
                "is not what others will have", known, count,
            )  # fmt: skip

    @property
    def unseen(self) -> list[Sample]:
        """The validation samples whose prompts are not trained on."""
        trained = {tuple(sample.prompt) for sample in self.samples["train"]}
        return [own for own in self.samples["validation"] if tuple(own.prompt) not in trained]

    @property
    def longest(self) -> int:
        """Tokens of the longest training sample."""
        return max(len(sample.ids) for sample in self.samples["train"])

    @property
    def supervised_share(self) -> float:
        """Share of the training tokens that are part of an answer."""
        samples = self.samples["train"]
        supervised = sum(stop - start for each in samples for start, stop in each.supervised)
        return supervised / sum(len(sample.ids) for sample in samples)

    def train_dataloader(self) -> TokenBatches:
        return self.loaders["train"]

    def val_dataloader(self) -> TokenBatches:
        return self.loaders["validation"]

    def state_dict(self) -> dict[str, int]:
        """How many processes the batches are made for."""
        return {"made_for": self.loaders["train"].made_for or num_processes()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        for loader in self.loaders.values():
            loader.made_for = state["made_for"]

    @enough_memory(
        "data.regeneration.memory_gib", "lower it, or data.max_new_tokens, so that less is kept"
    )
    def _answered(self, rows: list[Row], target: Target | None, how: Regeneration) -> list[Sample]:
        if target is None:
            both = "data.regenerate, data.generated_rows"
            raise InputError(f"{both}: need a target that answers; set them to false and 0")
        prompts = [row.prompt for row in rows]
        settings = self.max_new_tokens, self.cache_dir, self.seed, self.max_length
        return how.samples(target, self.tokenizer, prompts, *settings)

    def _usable(self, samples: list[Sample], split: str) -> list[Sample]:
        most = self.max_length
        if self.one_answer:
            samples = [turn for sample in samples for turn in sample.turns]
        kept = [sample for sample in samples if 0 < sample.prompt_length < len(sample.ids) <= most]
        longer = f"longer than {most} tokens (data.max_length, or the target's context)"
        reason = f"that are {longer} or have no prompt or no answer"
        if dropped := len(samples) - len(kept):
            log.warning("dropped %d of %d %s samples %s", dropped, len(samples), split, reason)
        if not any(sample.ids[sample.prompt_length + 1 :] for sample in kept):
            raise InputError(
                f"data: nothing is supervised in the {split} split ({len(samples)} samples); "
                "check the completions, data.max_length and data.max_new_tokens"
            )
        return kept
