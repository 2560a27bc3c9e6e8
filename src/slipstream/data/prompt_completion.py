"""The Lightning data module for prompt/completion data.

It reads the rows, renders them with the target's tokenizer and serves batches. It knows no model.
"""

import logging
from pathlib import Path

import lightning as L

from slipstream.core.errors import InputError
from slipstream.data.batches import TokenBatches
from slipstream.data.rendering import Sample, check_generation_markers, render_sample
from slipstream.data.rows import HubSource, Row, read_rows

log = logging.getLogger(__name__)


class PromptCompletionData(L.LightningDataModule):
    """Prompt/completion rows of one or several sources.

    path: local file or folder, or a list of them; wins over `hub`.
    hub: data sets on the hub, used when no path is given.
    max_length: samples with more tokens are dropped, counted and reported.
    batch_tokens: padded tokens of one batch. max_rows: cap on the rows of a split, spread evenly.
    """

    def __init__(
        self,
        path: str | list[str] | None,
        hub: list[HubSource] | None,
        max_length: int,
        batch_tokens: int,
        seed: int,
        max_train_rows: int | None = None,
        max_validation_rows: int | None = None,
    ):
        super().__init__()
        self.paths = [path] if isinstance(path, str | Path) else list(path or [])
        self.hub = list(hub or [])
        if not self.paths and not self.hub:
            raise InputError("data.path: no data given; name a JSONL file or folder")
        self.max_length, self.batch_tokens, self.seed = max_length, batch_tokens, seed
        self.max_rows = {"train": max_train_rows, "validation": max_validation_rows}
        self.tokenizer = None
        self.batches: dict[str, TokenBatches] = {}

    def rows(self, split: str) -> list[Row]:
        """All rows of `split` ('train' or 'validation'), cut evenly to the cap of that split."""
        if self.paths:
            rows = [row for path in self.paths for row in read_rows(path, split)]
        else:
            rows = [row for source in self.hub for row in source.rows(split)]
        cap = self.max_rows[split]
        if cap is not None and len(rows) > cap:
            rows = [rows[index * len(rows) // cap] for index in range(cap)]
        return rows

    def render(self, rows: list[Row]) -> list[Sample]:
        """Rows as samples; drops those longer than `max_length` and says how many."""
        check_generation_markers(self.tokenizer, rows[0].prompt, rows[0].completion)
        samples = [render_sample(self.tokenizer, row.prompt, row.completion) for row in rows]
        kept = [sample for sample in samples if len(sample.ids) <= self.max_length]
        if len(kept) < len(samples):
            log.warning(
                "dropped %d of %d samples longer than data.max_length=%d tokens",
                len(samples) - len(kept),
                len(samples),
                self.max_length,
            )
        return kept

    def prepare(self, tokenizer) -> None:
        """Render both splits with `tokenizer`; must be called before training."""
        self.tokenizer = tokenizer
        for split in ("train", "validation"):
            self.batches[split] = TokenBatches(
                self.render(self.rows(split)),
                tokenizer.pad_token_id,
                self.batch_tokens,
                self.seed,
                shuffle=split == "train",
            )

    def train_dataloader(self) -> TokenBatches:
        return self.batches["train"]

    def val_dataloader(self) -> TokenBatches:
        return self.batches["validation"]
