"""A corpus of token ids in which any n-gram is found at once: its suffixes, sorted.

Tokens and the order of their suffixes are two flat files that are mapped into memory, 4 and 4 or 8
bytes a token, and no more of them is read than a look-up needs: some hundred places. Suffixes are
compared by their first `COMPARED` tokens, which is more than any look-up asks.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol, Self, runtime_checkable

import numpy as np

from slipstream.core.errors import InputError
from slipstream.core.files import is_intact
from slipstream.core.settings import Ge, Le, Settings, Size
from slipstream.targets.target import Target

COMPARED = 16
"""How many tokens of a suffix decide its place among the others."""


class SuffixStore:
    """tokens: n ids, texts end with `END`; order: n places, by the `COMPARED` tokens from there."""

    END = 2**32 - 1

    def __init__(self, tokens: np.ndarray, order: np.ndarray):
        self.tokens, self.order = tokens, order
        # Most significant byte first: then bytes are in the order of the tokens that they spell.
        self._spelled = memoryview(tokens).cast("B")

    @classmethod
    def of_texts(cls, texts: list[list[int]]) -> "SuffixStore":
        """Sorted by doubling: the order by 2n tokens comes from the order by n (Manber, Myers).

        >>> store = SuffixStore.of_texts([[1, 2, 3], [1, 2, 4]])
        >>> store.find([1, 2]), store.after(np.arange(*store.find([1, 2])), 2, 9)
        ((0, 2), [[3], [4]])
        """
        ended = [np.asarray([*text, cls.END], dtype=np.uint32) for text in texts]
        tokens = np.concatenate(ended)
        _, ranks = np.unique(tokens, return_inverse=True)
        ranks, known = ranks.astype(np.int64), 1
        while known < COMPARED and ranks.max() < len(ranks) - 1:
            following = np.zeros_like(ranks)
            following[:-known] = ranks[known:] + 1
            pairs = ranks * (len(ranks) + 1) + following
            _, ranks = np.unique(pairs, return_inverse=True)
            known *= 2
        wide = np.int64 if len(tokens) > np.iinfo(np.int32).max else np.int32
        return cls(tokens.astype(">u4"), np.argsort(ranks, kind="stable").astype(wide))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "tokens.npy", self.tokens)
        np.save(folder / "order.npy", self.order)

    @classmethod
    def open(cls, folder: Path, vocab_size: int = END) -> "SuffixStore":
        """The store that was saved in `folder`, of tokens below `vocab_size`, mapped into memory.
        `InputError` if it is none."""
        try:
            files = [folder / f"{name}.npy" for name in ("tokens", "order")]
            found = [np.load(file, mmap_mode="r") for file in files]
            intact = all(map(is_intact, files))
            wrong = cls._wrong(*found, vocab_size) if intact else "its checksums are others"
        except Exception as error:  # a header of numpy's is text that anything may be written in
            wrong = str(error) or type(error).__name__
        if wrong:
            raise InputError(
                f"drafter.store: {folder} holds no whole store ({wrong}); remove it, and it is "
                "made anew"
            )
        return cls(*found)

    @classmethod
    def _wrong(cls, tokens: object, order: object, vocab_size: int) -> str | None:
        """What makes these no tokens and no order of their places; reads both once."""
        if not isinstance(tokens, np.ndarray) or not isinstance(order, np.ndarray):
            return "its files are archives"
        if tokens.dtype != ">u4" or order.dtype not in (np.int32, np.int64):
            return f"its numbers are {tokens.dtype} and {order.dtype}"
        if tokens.ndim != 1 or tokens.shape != order.shape or not len(tokens):
            return f"its files hold {tokens.shape} and {order.shape} numbers"
        if order.min() < 0 or order.max() >= len(order) or tokens[-1] != cls.END:
            return "its places are out of range"
        if ((tokens >= vocab_size) & (tokens != cls.END)).any():
            return f"it has tokens beyond the {vocab_size} of the target"
        return None

    def __len__(self) -> int:
        return len(self.tokens)

    def store(self, target: Target | None) -> "SuffixStore":
        """Itself: a `Corpus` that is there already."""
        return self

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.order.nbytes

    def find(self, ngram: list[int]) -> tuple[int, int]:
        """Which places of `order` begin with an n-gram of up to `COMPARED` tokens: from, to."""
        wanted = np.asarray(ngram, dtype=">u4").tobytes()
        spelled, order, width = self._spelled, self.order, len(wanted)

        def first(place: int) -> bytes:
            start = 4 * int(order[place])
            return bytes(spelled[start : start + width])

        every = range(len(order))
        low = bisect_left(every, wanted, key=first)
        return low, bisect_right(every, wanted, lo=low, key=first)

    def longest(self, tokens: list[int], max_ngram: int) -> tuple[int, int, int]:
        """The longest suffix of `tokens`, up to `max_ngram`, that occurs: from, to, its length.

        If a suffix occurs, so do all shorter ones, so the length is found by bisection.
        """
        low, found = 0, (0, 0, 0)
        high = min(max_ngram, COMPARED, len(tokens))
        while low < high:
            size = (low + high + 1) // 2
            span = self.find(tokens[-size:])
            if span[0] < span[1]:
                low, found = size, (*span, size)
            else:
                high = size - 1
        return found

    def after(self, places: np.ndarray, skipped: int, length: int) -> list[list[int]]:
        """Up to `length` tokens of the text at each place of `order`, from `skipped` tokens on."""
        starts = self.order[places].astype(np.int64)[:, None] + skipped
        # The last token ends a text.
        within = np.minimum(starts + np.arange(length), len(self) - 1)
        rows = self.tokens[within].tolist()
        return [row[: row.index(self.END)] if self.END in row else row for row in rows]


@runtime_checkable
class Corpus(Protocol):
    """Where a store comes from."""

    def store(self, target: Target) -> SuffixStore:
        """The store of a corpus in the target's tokens."""


@dataclass(eq=False)
class Retrieval(Settings):
    """Continuations of a text that a corpus has.

    corpus: where the store comes from; max_ngram: longest ending looked for; max_matches: how many
    of its occurrences are looked at, evenly over all; length: tokens of a continuation.
    """

    section = "drafter.retrieval"
    corpus: Corpus
    max_ngram: Annotated[int, Ge(1), Le(COMPARED)]
    max_matches: Size
    length: Size

    def attach(self, target: Target) -> Self:
        """The same from the corpus in the target's tokens: its store."""
        return replace(self, corpus=self.corpus.store(target))

    def counted(self, tokens: list[int]) -> list[tuple[tuple[int, ...], float]]:
        """All prefixes of what followed the longest known ending of `tokens`, each with the share
        of the occurrences that it followed; the most frequent first, a prefix before its
        extensions."""
        low, high, size = self.corpus.longest(tokens, self.max_ngram)
        count = min(self.max_matches, high - low)
        if not count:
            return []
        places = low + np.arange(count) * (high - low) // count
        texts = Counter(map(tuple, self.corpus.after(places, size, self.length)))
        counts: dict[tuple[int, ...], int] = defaultdict(int)
        for text, times in texts.items():
            for end in range(1, len(text) + 1):
                counts[text[:end]] += times
        ranked = sorted(counts, key=lambda path: (-counts[path], len(path)))
        return [(path, counts[path] / count) for path in ranked]

    def continuations(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """The most frequent continuations, each as long as it is, none a beginning of another."""
        paths = [path for path, _ in self.counted(tokens)]
        begun = {path[:-1] for path in paths}
        return [path for path in paths if path not in begun]
