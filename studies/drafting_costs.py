"""What drafting itself costs, by the size of the vocabulary and of a corpus."""

import time
from collections.abc import Sequence

import numpy as np

from slipstream.core.settings import Budget, Count
from slipstream.decoding.answer import Limits
from slipstream.drafters.base import Drafter
from slipstream.drafters.suffixes import SuffixStore
from studies import Plot, Prompt, Result, Target
from studies.decoding import decode
from studies.timing import random_target

PROMPT_TOKENS, ANSWERS, TEXT = 64, 6, 512
ENDING = 8  # tokens of the text that are looked up in a corpus


def drafting_costs(
    target: Target,
    prompts: list[Prompt],
    drafters: dict[str, Drafter],
    budget: Budget,
    vocabularies: Sequence[Count],
    corpora: Sequence[Count],
    lookups: Count,
) -> Result:
    """`drafters` that know only tokens and the target's predictions, with trees of `budget` nodes,
    for the run's target and for random ones of one layer with `vocabularies`, whose answers have
    nothing to find: what is timed is the work. corpora: tokens of a sorted corpus; lookups: how
    many endings are looked up in each."""
    targets = {f"{target.vocab_size:,} (the target)": target}
    targets |= {f"{size:,}": random_target(size, 1, target.device) for size in vocabularies}
    rows = []
    for name, drafter in drafters.items():
        row: dict[str, object] = {"drafter": name}
        for vocabulary, verifying in targets.items():
            attached = drafter.attach(verifying)
            texts = zipf_texts((1 + ANSWERS) * TEXT, verifying.vocab_size, seed=1)
            ids = [text[:PROMPT_TOKENS] for text in texts]
            given, limits = (verifying, attached, budget), Limits(64)
            decode(*given, ids[:1], limits)  # warms up
            total = decode(*given, ids[1:], limits)
            drafting = total.shares.get("draft", 0.0)
            row[f"ms a step, {vocabulary}"] = 1000 * drafting / total.target_forwards
            row[f"store MB, {vocabulary}"] = attached.memory() / 1e6
            if verifying is target:
                step = total.seconds - total.shares["prefill"]
                row["share of the target's step, %"] = 100 * drafting / step
        rows.append(row)
    sorting = [_corpus_cost(size, lookups) for size in corpora]
    columns = tuple(f"ms a step, {vocabulary}" for vocabulary in targets)
    plot = Plot("drafter", (columns,), kind="bar")
    return Result("What drafting costs", rows, (plot,), {"Sorted corpora": sorting})


class ZipfCorpus:
    """A corpus of random texts in any target's tokens (`drafters.suffixes.Corpus`)."""

    def __init__(self, size: Count):
        self.size = size

    def store(self, target: Target) -> SuffixStore:
        return SuffixStore.of_texts(zipf_texts(self.size, target.vocab_size))


def zipf_texts(size: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Texts of `TEXT` tokens that are as frequent as words are (Zipf, exponent 1.2)."""
    tokens = np.random.default_rng(seed).zipf(1.2, size) % vocabulary
    return [text.tolist() for text in np.array_split(tokens, max(1, size // TEXT))]


def _corpus_cost(size: int, lookups: int) -> dict[str, object]:
    """What a corpus of `size` tokens, and an end for each text, costs to sort and to look up in."""
    texts = zipf_texts(size, 150_000)
    started = time.perf_counter()
    store = SuffixStore.of_texts(texts)
    built = time.perf_counter() - started
    chosen = np.random.default_rng(0).integers(0, len(texts), 2 * lookups)
    found = 0
    for place, text in enumerate(chosen):
        if place == lookups:  # the first half warms up
            started = time.perf_counter()
        low, high, length = store.longest(texts[text][:ENDING], ENDING)
        middle = np.array([(low + high) // 2])
        found += len(store.after(middle, length, ENDING)[0]) if high > low else 0
    return {
        "tokens": len(store),
        "sorted in, s": built,
        "MB": store.nbytes / 1e6,
        "a look-up, ms": 1000 * (time.perf_counter() - started) / lookups,
        "found a look-up, tokens": found / len(chosen),
    }
