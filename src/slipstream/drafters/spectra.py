"""SPECTRA: candidate sequences that the target extends while it verifies feed two dictionaries.

Candidates of `ngram` tokens become one token longer in every verifying forward, and one shorter at
the front. All their sub-n-grams go into a forward dictionary (token -> what followed) and a
backward dictionary (n-gram -> next token), which the guesses come from. Source: SPECTRA,
Algorithm 1, lines 7 to 17 of which are the order `forward_first`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch

from slipstream.core.settings import PositiveShare, Share, Size
from slipstream.core.transfer import on_device
from slipstream.drafters.guesses import Branches, Guessing, GuessPool, num_branches
from slipstream.drafters.ngrams import longest_known

KEPT = 2**20
"""N-grams of the backward dictionary: when there are more, the older half is forgotten."""
ORDERS = ("backward_first", "forward_first")
"""Of guesses. The second is the paper's, where the chain falls off if there are many others."""


@dataclass(eq=False, kw_only=True)
class Spectra(Guessing):
    """candidates: most of them (W); unseen_probability: how often a candidate is extended by the
    likeliest token that is no key of the forward dictionary (the paper's 1 - tau). forward,
    backward: which dictionaries guesses come from; order: which of them finds room first. chain:
    most tokens of the backward dictionary's one guess; backward_share: most of the nodes for
    guesses that it may take, as a part of them (drafter.backward=false leaves it out). sub_ngrams:
    whether parts of candidates are stored, or whole ones alone. For the others see `Guessing`.
    """

    candidates: Size
    unseen_probability: Share
    forward: bool
    backward: bool
    order: Literal[ORDERS]
    chain: Size
    backward_share: PositiveShare
    sub_ngrams: bool

    def additions(self) -> list[str]:
        acting = {
            "unseen_probability": not self.unseen_probability,
            "order": self.order == "backward_first",
            "chain": self.chain > self.ngram,
            "backward_share": self.backward_share < 1,
        }
        return super().additions() + [name for name, acts in acting.items() if acts]

    def stored(self) -> "Dictionaries":
        return Dictionaries(self.ngram, self.guesses, self.sub_ngrams)

    def branches(self, prompt: list[int], budget: int, stored: "Dictionaries") -> "_Candidates":
        count = num_branches(self.candidates, self.ngram, budget)
        return _Candidates(prompt, count, stored, self.unseen_probability)

    def said(self, logits: torch.Tensor, states: list["_Candidates"]) -> torch.Tensor:
        """(B, candidates, V) -> (B, candidates, 2): the likeliest token, and the likeliest one that
        is no key of the forward dictionary yet, however far down; the first where all are keys.
        (B, candidates, 1), the likeliest alone, if no other is asked for."""
        if not self.unseen_probability:
            return super().said(logits, states)
        likeliest = logits.argmax(-1)
        known: dict[int, torch.Tensor] = {}
        for own, state in zip(logits, states, strict=True):
            stored = state.stored  # one of all requests, where it is kept
            if id(stored) not in known:
                keys = torch.tensor([*stored.continuations], dtype=torch.long)
                known[id(stored)] = on_device(keys, own.device)
            own[:, known[id(stored)]] = -torch.inf
        best, unseen = logits.max(-1)
        return torch.stack([likeliest, torch.where(best == -torch.inf, likeliest, unseen)], -1)

    def found(self, tokens: list[int], stored: "Dictionaries", room: int) -> list[Sequence[int]]:
        """The backward dictionary's chain, and what the forward one has, in `order`."""
        longest = min(self.chain, max(1, int(self.backward_share * room)))
        chain = stored.chain(tokens, longest) if self.backward else []
        backward = [chain] if chain else []
        forward = super().found(tokens, stored, room) if self.forward else []
        return backward + forward if self.order == "backward_first" else forward + backward


class Dictionaries(GuessPool):
    """The forward dictionary, token -> sequences, is a pool; backward: n-gram -> next token."""

    def __init__(self, ngram: int, most: int, sub_ngrams: bool):
        super().__init__(ngram, most)
        self.sub_ngrams = sub_ngrams
        self.backward: dict[tuple[int, ...], int] = {}

    def add_candidate(self, ngram: Sequence[int]) -> None:
        """Remember a candidate, and its parts."""
        *before, last = ngram
        for start in range(len(before) if self.sub_ngrams else 1):
            self.add(ngram[start:])
            self.backward[tuple(before[start:])] = last
        self._forget()

    def read(self, tokens: Sequence[int], start: int) -> None:
        """Parts of n-grams of a text are beginnings of others, which the forward dictionary has."""
        super().read(tokens, start)
        first = start + self.ngram - 1  # the last token of the first n-gram
        for size in range(1 if self.sub_ngrams else self.ngram - 1, self.ngram):
            slices = (tokens[first - size + place : -1] for place in range(size))
            self.backward.update(zip(zip(*slices, strict=False), tokens[first:], strict=False))
        self._forget()

    def _forget(self) -> None:
        if len(self.backward) > KEPT:
            self.backward = dict(islice(self.backward.items(), KEPT // 2, None))

    def chain(self, tokens: list[int], longest: int) -> list[int]:
        """Up to `longest` tokens, one by one those of the longest suffix that `backward` knows."""
        size, ending = self.ngram - 1, tokens[1 - self.ngram :]
        most = len(ending) + longest
        while len(ending) < most and (ngram := longest_known(self.backward, ending, size)):
            ending.append(self.backward[ngram])
        return ending[most - longest :]


class _Candidates(Branches):
    """Sequences of `ngram` tokens. The first token of each has left the forward."""

    def __init__(
        self, prompt: list[int], count: int, stored: Dictionaries, unseen_probability: float
    ):
        super().__init__(stored)
        self.unseen_probability = unseen_probability
        self.sequences = [self.drawn(prompt, stored.ngram) for _ in range(count)]

    def paths(self) -> list[list[int]]:
        return [sequence[1:] for sequence in self.sequences]

    def extend(self, said: list[list[int]]) -> None:
        for place, (likeliest, *unseen) in enumerate(said):
            asked = unseen and self.chance.random() < self.unseen_probability
            self.sequences[place] = [*self.sequences[place][1:], unseen[0] if asked else likeliest]
            self.stored.add_candidate(self.sequences[place])
