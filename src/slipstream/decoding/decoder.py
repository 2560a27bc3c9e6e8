"""What plain and speculative decoding share: prompts in, answers out.

Several prompts may be answered together, each at its own length; one that is finished leaves the
batch. Prompts run in parts, right-padded, so that no mask is quadratic in a prompt's length.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from slipstream.core.cache import StepCache
from slipstream.core.clock import Clock
from slipstream.core.masks import causal_mask, tree_mask
from slipstream.core.sampling import Sampling, SeededRandomness
from slipstream.decoding.answer import Answer, Generation, Limits, Run, TokenCallback
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.base import Context
from slipstream.targets.target import LayerVisitor, Rows, Target

PREFILL_ROWS = 1024
"""Most rows of a prompt in one forward."""


@dataclass
class Line:
    """One prompt of a batch: what a drafter may know of it, its answer so far, the target's
    forwards and their rows, SPRINTER's runs, and the drafted tokens that each step kept."""

    context: Context
    answer: Answer
    forwards: int = 0
    rows: int = 0
    runs: list[Run] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count(self, rows: int) -> None:
        """The target worked on so many rows of this prompt in one forward."""
        self.forwards, self.rows = self.forwards + 1, self.rows + rows


@dataclass(frozen=True)
class First:
    """The first token of the answer to prompt `place`; part: the prompt's tokens in the forward
    that decided it, with `logits` (1, V)."""

    place: int
    part: list[int]
    token: int
    logits: torch.Tensor


class Decoder:
    """Decoding of `target`; subclasses say what a step is.

    visitors: their part in the forwards, if any.
    """

    visitors: Sequence[LayerVisitor] = ()

    def __init__(self, target: Target, sampling: Sampling, limits: Limits):
        self.target, self.sampling, self.limits = target, sampling, limits

    def generate(
        self, prompt_ids: list[int], seed: int = 0, callback: TokenCallback | None = None
    ) -> Generation:
        """Answer `prompt_ids`; raises `InputError` for a prompt beyond the target's context."""
        return self._run([prompt_ids], [seed], callback)[0]

    def generate_batch(
        self, prompts: list[list[int]], seeds: list[int] | None = None
    ) -> list[Generation]:
        """Answer several prompts together, each as it is answered alone (rounding apart).

        Their statistics are shares of the batch: seconds add up to those of the call.
        """
        seeds = [0] * len(prompts) if seeds is None else seeds
        return self._run(prompts, seeds) if prompts else []

    @torch.inference_mode()
    def _run(
        self, prompts: list[list[int]], seeds: list[int], callback: TokenCallback | None = None
    ) -> list[Generation]:
        started, target, clock = time.perf_counter(), self.target, Clock()
        rooms = self.limits.check_prompts(target, prompts)
        longest = max(len(ids) + room for ids, room in zip(prompts, rooms, strict=True))
        cache = target.new_cache(longest + self._extra_rows(), len(prompts))
        lines = [
            Line(
                Context(list(ids), cache, self.sampling, SeededRandomness(seed), clock),
                Answer(target, self.limits, room, callback),
            )
            for ids, room, seed in zip(prompts, rooms, seeds, strict=True)
        ]
        self._begin([line.context for line in lines])
        self._prefill(lines, cache, clock)
        going = self._unfinished(lines, cache)
        while going:
            self._step(going, cache, clock)
            going = self._unfinished(going, cache)
        count = len(lines)
        seconds = (time.perf_counter() - started) / count
        shares = {name: spent / count for name, spent in clock.seconds.items()}
        return [
            Generation(
                line.answer.ids,
                line.answer.text(),
                line.answer.finished,
                Statistics(
                    1,
                    len(line.answer.ids),
                    line.forwards,
                    seconds,
                    dict(shares),
                    line.rows,
                    line.answer.drafted,
                ),
                tuple(line.runs),
                tuple(line.accepted),
            )
            for line in lines
        ]

    def _prefill(self, lines: list[Line], cache: StepCache, clock: Clock) -> None:
        """Run the prompts and decide the first token of each answer."""
        target, prompts = self.target, [line.context.tokens.copy() for line in lines]
        for start in range(0, max(map(len, prompts)), PREFILL_ROWS):
            parts = [prompt[start : start + PREFILL_ROWS] for prompt in prompts]
            width = max(map(len, parts))
            padded = [part + [0] * (width - len(part)) for part in parts]
            ids = torch.tensor(padded, device=target.device)
            positions = torch.arange(start, start + width, device=target.device)
            mask = None
            if start:
                mask = tree_mask([start], causal_mask(width, target.device)[None], cache.slots)
            ended = [
                place
                for place, prompt in enumerate(prompts)
                if start < len(prompt) <= start + PREFILL_ROWS
            ]
            with clock.share("prefill"):
                positions = positions.expand(len(parts), -1)
                rows = target.forward(ids, positions, mask, cache, self.visitors)
            cache.commit_each([list(range(len(part))) for part in parts])
            if not ended:
                continue
            with clock.share("prefill"):
                last = [len(parts[place]) - 1 for place in ended]
                logits = target.logits(rows.hidden[ended, last])
            tokens = self._choose(logits, [lines[place].context for place in ended])
            firsts = [
                First(place, parts[place], token, own)
                for place, token, own in zip(ended, tokens, logits.split(1), strict=True)
            ]
            self._first(lines, firsts, start, rows, ids)

    def _unfinished(self, lines: list[Line], cache: StepCache) -> list[Line]:
        """Let the finished ones leave."""
        kept = [place for place, line in enumerate(lines) if line.answer.finished is None]
        if kept and len(kept) < len(lines):
            cache.keep_sequences(kept)
            self._leave(kept)
        return [lines[place] for place in kept]

    def _choose(self, logits: torch.Tensor, contexts: list[Context]) -> list[int]:
        """The next token of each sequence, from (B, V) logits."""
        if self.sampling.greedy:
            return logits.argmax(-1).tolist()
        probabilities = self.sampling.probabilities(logits).cpu()
        pairs = zip(contexts, probabilities, strict=True)
        return [context.randomness.draw(each) for context, each in pairs]

    def _extra_rows(self) -> int:
        """How many rows are staged at most beyond the tokens of prompt and answer."""
        return 0

    def _begin(self, contexts: list[Context]) -> None:
        """Called before the prefill."""

    def _first(
        self, lines: list[Line], firsts: list[First], start: int, rows: Rows, ids: torch.Tensor
    ) -> None:
        """First tokens are decided. start: tokens before those of the forward; rows, ids: of it,
        ids (B, R)."""
        raise NotImplementedError

    def _step(self, lines: list[Line], cache: StepCache, clock: Clock) -> None:
        """At most one more forward of the target: decide at least one token of each line."""
        raise NotImplementedError

    def _leave(self, kept: list[int]) -> None:
        """Called when only these of the sequences go on."""
