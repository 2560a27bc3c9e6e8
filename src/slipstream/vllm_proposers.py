"""Drafters of n-grams as vLLM's `custom_class` proposers: token ids in, chains out.

vLLM (PR 39487) makes the class that `speculative_config` names, {"method": "custom_class", "model":
"slipstream.vllm_proposers.AdaptiveNgrams", "num_speculative_tokens": 7}, and verifies what it
proposes. Settings come with `additional_config={"slipstream": {...}}`. Nothing of vLLM is imported.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from slipstream.core.settings import Size, Text, check
from slipstream.drafters.ngrams import Followers, LastPlaces
from slipstream.drafters.suffix_decoding import Texts
from slipstream.drafters.suffixes import Retrieval, SuffixStore


class _Proposer(ABC):
    """defaults: of the settings that `configure` takes, where a class has others."""

    defaults: ClassVar[dict[str, object]] = {}

    def __init__(self, vllm_config):
        given = self.defaults | (vllm_config.additional_config or {}).get("slipstream", {})
        check(self.configure, given, "additional_config.slipstream")
        self.most = vllm_config.speculative_config.num_speculative_tokens
        self.model_config = vllm_config.model_config
        self.configure(**given)

    @abstractmethod
    def configure(self, **settings) -> None:
        """Take the settings."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """A chain for each request. sampled_token_ids: of this step, none where the prompt is not
        through; num_tokens_no_spec: (B,), how many tokens of (B, T) token_ids_cpu are decided."""
        texts = {
            row: token_ids_cpu[row, : num_tokens_no_spec[row]]
            for row, sampled in enumerate(sampled_token_ids)
            if sampled
        }
        chains: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, chain in self.chains(texts).items():
            room = self.model_config.max_model_len - len(texts[row])
            chains[row] = chain[: max(0, min(self.most, room))]
        return chains

    @abstractmethod
    def chains(self, texts: dict[int, np.ndarray]) -> dict[int, list[int]]:
        """By row, what may follow each text, `self.most` tokens or more at best."""


class PromptLookup(_Proposer):
    """What followed the last time that the longest ending of the text occurred in it."""

    defaults: ClassVar = {"max_ngram": 3}
    index = LastPlaces

    def configure(self, max_ngram: Size) -> None:
        self.max_ngram = max_ngram
        self.known: dict[int, Known] = {}

    def chains(self, texts: dict[int, np.ndarray]) -> dict[int, list[int]]:
        """Requests have no names here and rows change hands: a text goes on with the index of the
        text that it begins with, and with a new one where none is left. Rows without a new token
        keep theirs, until another request has them."""
        before, found = self.known, {}
        for row, text in texts.items():
            begun = (
                other
                for other in sorted(before, key=lambda other: other != row)
                if np.array_equal(text[: len(before[other].text)], before[other].text)
            )
            known = before.pop(next(begun, None), None)
            known = known or Known(text[:0], [], self.index(self.max_ngram))
            known.tokens += text[len(known.text) :].tolist()
            known.text = text.copy()  # vLLM writes on in its own
            known.index.extend(known.tokens)
            found[row] = known
        self.known = before | found
        return {row: k.index.continuation(k.tokens, self.most)[0] for row, k in found.items()}


@dataclass
class Known:
    """A text as vLLM has it, and as a list, and its index."""

    text: np.ndarray
    tokens: list[int]
    index: LastPlaces


class AdaptiveNgrams(PromptLookup):
    """ANPD: token by token, what has followed the longest known ending most often."""

    defaults: ClassVar = {"max_ngram": 4}
    index = Followers


class _Suffixes:
    """A growing text as the indexes of n-grams have it."""

    def __init__(self, depth: int):
        self.depth, self.texts = depth, Texts()

    def extend(self, tokens: list[int]) -> None:
        self.texts.extend(tokens[len(self.texts) :])

    def continuation(self, tokens: list[int], length: int) -> tuple[list[int], list[float]]:
        """The path of the most probable children, and how probable each node is."""
        draft = self.texts.best(tokens, length + 1, self.depth, 1.0, 0.1, width=1)
        return draft.tokens[1:], draft.confidences[1:]


class SuffixDecoding(PromptLookup):
    """What followed the longest endings of the text most often, as far as they are long."""

    defaults: ClassVar = {"max_ngram": 64}
    index = _Suffixes


class Rest(_Proposer):
    """The most frequent continuation that a corpus has. store: the folder of a corpus, which
    `infer.py drafter=rest` made for the same tokenizer and keeps under `corpus.cache_dir`."""

    def configure(self, store: Text, max_ngram: Size = 8, max_matches: Size = 32) -> None:
        corpus = SuffixStore.open(Path(store), self.model_config.get_vocab_size())
        self.max_ngram = max_ngram
        self.retrieved = Retrieval(corpus, max_ngram, max_matches, self.most)

    def chains(self, texts: dict[int, np.ndarray]) -> dict[int, list[int]]:
        endings = {row: text[-self.max_ngram :].tolist() for row, text in texts.items()}
        found = {row: self.retrieved.continuations(own) for row, own in endings.items()}
        return {row: list(paths[0]) if paths else [] for row, paths in found.items()}
