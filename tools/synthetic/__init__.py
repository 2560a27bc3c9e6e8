"""Inventing the prompts that ship with the package, without completions.

Every prompt belongs to one split by a hash of its text, so prompts of different splits never
coincide, whatever seeds they were drawn with. It knows nothing of tokens or of the answers.
"""

import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import BinaryIO

from slipstream.core.files import write_atomically
from tools.synthetic import data_to_text, text_to_sql

KINDS: dict[str, Callable[[Random], str]] = {
    "data_to_text": data_to_text.draw_prompt,
    "text_to_sql": text_to_sql.draw_prompt,
}
SPLITS = {"train": range(90), "validation": range(90, 95), "test": range(95, 100)}
SHIPPED = {"train": 12000, "validation": 1000, "test": 2000}
"""How many prompts of each kind ship with the package; their seed is 0."""


def split_of(prompt: str) -> str:
    """The split `prompt` belongs to: its SHA-256 hash modulo 100, see `SPLITS`."""
    remainder = int.from_bytes(hashlib.sha256(prompt.encode()).digest()) % 100
    return next(split for split, remainders in SPLITS.items() if remainder in remainders)


def invented(kind: str, split: str, seed: int) -> Iterator[str]:
    """Distinct prompts of one of `KINDS` and one split, without end, the same for the same
    arguments."""
    rng, seen = Random(f"{kind} {seed}"), set()
    while True:
        prompt = KINDS[kind](rng)
        if prompt not in seen and split_of(prompt) == split:
            seen.add(prompt)
            yield prompt


def lines_of(kind: str, split: str, count: int, seed: int) -> bytes:
    """The JSON Lines of `count` prompts."""
    prompts = islice(invented(kind, split, seed), count)
    return b"".join(json.dumps({"prompt": prompt}).encode() + b"\n" for prompt in prompts)


def write(folder: Path, counts: dict[str, int], seed: int) -> None:
    """Write `folder/KIND/SPLIT.jsonl.gz` with as many prompts of every kind as `counts` says."""
    for kind in KINDS:
        for split, count in counts.items():
            content = lines_of(kind, split, count, seed)
            write_atomically(folder / kind / f"{split}.jsonl.gz", partial(_compress, content))


def _compress(content: bytes, file: BinaryIO) -> None:
    with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as compressed:
        compressed.write(content)
