"""SPECTRA: candidate sequences that the target extends while it verifies feed two dictionaries.

The pool's `candidates` sequences of `ngram` tokens ride along in every verifying forward as
branches of the draft tree, one token longer each time and one token shorter at the front. All their
sub-n-grams go into a forward dictionary (token -> what followed) and a backward dictionary (n-gram
-> next token), which the guesses come from. Source: SPECTRA, Algorithm 1.
"""

import random

import torch

from slipstream.core.errors import InputError
from slipstream.core.growth import PathTree
from slipstream.core.tree import DraftTree
from slipstream.drafters.base import Context, Drafter, Outlook, Step
from slipstream.drafters.guesses import GuessPool, riding
from slipstream.drafters.memory import bytes_of
from slipstream.drafters.suffixes import Retrieval
from slipstream.targets.target import Target

RANKS = 32
"""Among so many of the likeliest tokens one that the forward dictionary does not know is sought."""


class Spectra(Drafter):
    """candidates: most of them (W); ngram: N; guesses: most sequences verified at once, and kept of
    each first token (G). unseen_probability: how often a candidate is extended by the likeliest
    token that is no key of the forward dictionary (the paper's 1 - tau). forward, backward: which
    dictionaries guesses come from; sub_ngrams: whether parts of candidates are stored, or whole
    ones alone. retrieval: guesses from a corpus, after the others, None for none. text: whether the
    n-grams of prompt and answer are stored, too. keep: whether later prompts find what earlier ones
    stored.
    """

    mergeable = False

    def __init__(
        self,
        candidates: int,
        ngram: int,
        guesses: int,
        unseen_probability: float,
        forward: bool,
        backward: bool,
        sub_ngrams: bool,
        retrieval: Retrieval | None,
        text: bool,
        keep: bool,
    ):
        if candidates < 1 or ngram < 2 or guesses < 1:
            raise InputError(
                "drafter: needs candidates and guesses of at least 1, and ngram of at least 2"
            )
        if not 0 <= unseen_probability <= 1:
            raise InputError("drafter.unseen_probability: must be between 0 and 1")
        self.candidates, self.ngram, self.guesses = candidates, ngram, guesses
        self.unseen_probability = unseen_probability
        self.forward, self.backward, self.sub_ngrams = forward, backward, sub_ngrams
        self.retrieval, self.text, self.keep = retrieval, text, keep
        self.kept: _Dictionaries | None = None
        self.pools: list[_Pool] = []

    def bind(self, target: Target) -> Target:
        if self.retrieval is not None:
            self.retrieval.bind(target)
        return target

    def begin(self, contexts: list[Context], budget: int) -> None:
        count = riding(self.candidates, self.ngram, budget)
        for context in contexts:
            stored = _Dictionaries(self.ngram, self.guesses, self.sub_ngrams)
            if self.keep:
                stored = self.kept = self.kept or stored
            context.state = _Pool(context.tokens, count, stored)
        self.pools = [context.state for context in contexts]

    @property
    def store_bytes(self) -> int:
        stored = [pool.stored for pool in self.pools]
        forward = [each.forward.continuations for each in stored]
        return bytes_of([*forward, *(each.backward for each in stored)])

    def propose(self, contexts: list[Context], budget: int) -> list[DraftTree]:
        with contexts[0].clock.share("draft"):
            return [self._guessed(context, budget) for context in contexts]

    def _guessed(self, context: Context, budget: int) -> DraftTree:
        pool: _Pool = context.state
        if self.text:
            pool.read(context.tokens)
        riding_nodes = len(pool.candidates) * (self.ngram - 1)
        paths = PathTree(context.tokens[-1], budget - riding_nodes)
        for guess in self.guessed(context.tokens, pool.stored)[: self.guesses]:
            paths.add(guess[: context.max_depth])
        paths.budget = budget
        pool.ends = [paths.add(candidate[1:]) for candidate in pool.candidates]
        return paths.tree()

    def guessed(self, tokens: list[int], stored: "_Dictionaries") -> list[list[int]]:
        """Continuations of `tokens`, in the order in which they find room: the backward
        dictionary's chain, which matches most tokens, the forward dictionary, the corpus."""
        guesses = []
        if self.backward:
            guesses.append(stored.chain(tokens, self.ngram))
        if self.forward:
            guesses += stored.forward.starting_with(tokens[-1])
        if self.retrieval is not None:
            guesses += self.retrieval.continuations(tokens)
        return [guess for guess in guesses if guess]

    def foresee(self, contexts: list[Context], outlook: Outlook) -> tuple[torch.Tensor, ...]:
        """(B, N, RANKS) what the target would say after each node, the likeliest first."""
        if outlook.logits is None:
            return ()
        return (outlook.logits.topk(min(RANKS, outlook.logits.shape[-1])).indices,)

    def observe(self, context: Context, step: Step) -> None:
        if not step.foreseen:
            return
        with context.clock.share("draft"):
            pool: _Pool = context.state
            for place, ranked in enumerate(step.foreseen[0][pool.ends].tolist()):
                pool.extend(place, self._extension(ranked, pool))

    def _extension(self, ranked: list[int], pool: "_Pool") -> int:
        if pool.chance.random() < self.unseen_probability:
            return next((each for each in ranked if each not in pool.stored.forward), ranked[0])
        return ranked[0]


class _Dictionaries:
    """forward: token -> sequences; backward: n-gram -> next token."""

    def __init__(self, ngram: int, guesses: int, sub_ngrams: bool):
        self.ngram, self.sub_ngrams = ngram, sub_ngrams
        self.forward = GuessPool(ngram, guesses)
        self.backward: dict[tuple[int, ...], int] = {}

    def add(self, sequence: list[int]) -> None:
        """A sequence of `ngram` tokens, of which the last one is new."""
        *before, last = sequence
        for start in range(len(before) if self.sub_ngrams else 1):
            self.forward.add(sequence[start:])
            self.backward[tuple(before[start:])] = last

    def chain(self, tokens: list[int], length: int) -> list[int]:
        """Token by token what the backward dictionary has for the longest suffix it knows."""
        ending, found = tokens[-self.ngram + 1 :], []
        while len(found) < length:
            suffixes = (tuple(ending[start:]) for start in range(len(ending)))
            token = next((self.backward[each] for each in suffixes if each in self.backward), None)
            if token is None:
                break
            found.append(token)
            ending = [*ending, token][-self.ngram + 1 :]
        return found


class _Pool:
    """The candidates of one prompt. Each begins with a token that has left the forward: it is
    `ngram` tokens long, and its last ones are rows of the next forward."""

    def __init__(self, prompt: list[int], count: int, stored: _Dictionaries):
        self.chance, self.stored, self.read_to = random.Random(0), stored, 0
        self.candidates = [
            [self.chance.choice(prompt) for _ in range(stored.ngram)] for _ in range(count)
        ]
        self.ends: list[int] = []

    def extend(self, place: int, token: int) -> None:
        candidate = [*self.candidates[place][1:], token]
        self.candidates[place] = candidate
        self.stored.add(candidate)

    def read(self, tokens: list[int]) -> None:
        """Store the n-grams of the text that have come to it."""
        size = self.stored.ngram
        for start in range(self.read_to, len(tokens) - size + 1):
            self.stored.add(tokens[start : start + size])
        self.read_to = max(self.read_to, len(tokens) - size + 1)
