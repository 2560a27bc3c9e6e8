"""SPRINTER: a small verifier decides when the target is asked at all (Algorithm 2). Approximate.

The draft model writes, one sampled token after the other, as long as the verifier holds them for
acceptable. At its first no the target reads, in one forward, all that it has not seen, and judges
the last token: it is kept with min(1, p/q), else drawn again from norm(max(0, p - q)). A run that
reaches `cap` tokens also ends with the target's forward, but its last token was not in doubt: it
stays, and the target's own next token follows. What is written has not the target's distribution.
"""

import torch
from torch import nn

from slipstream.core.cache import StepCache
from slipstream.core.clock import Clock
from slipstream.core.errors import InputError
from slipstream.core.masks import causal_mask, tree_mask
from slipstream.core.sampling import Sampling
from slipstream.core.transfer import on_device
from slipstream.core.verification import residual
from slipstream.decoding.answer import Limits, Run
from slipstream.decoding.decoder import Decoder, Line
from slipstream.drafters.base import Context
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.sprinter import SprinterVerifier
from slipstream.targets.compiled import compile_like
from slipstream.targets.loading import check_vocabularies
from slipstream.targets.reading import Reader
from slipstream.targets.target import Target


class SprinterDecoder(Decoder):
    """Approximate decoding of `target`.

    verifier: trained for `draft` and `target`, or its folder; ratio: which of its lambdas;
    threshold: a token whose predicted probability of being acceptable is smaller is in doubt; cap:
    most tokens of a run. Raises `InputError` for parts that do not belong together.
    """

    exact = False

    def __init__(
        self,
        target: Target,
        draft: Target,
        verifier: SprinterVerifier | str,
        sampling: Sampling,
        limits: Limits,
        ratio: float,
        threshold: float,
        cap: int,
    ):
        super().__init__(target, sampling, limits)
        if sampling.greedy:
            raise InputError(
                "sampling.temperature: SPRINTER samples, as its verifier was trained to; set it "
                "above 0"
            )
        if not 0 < threshold < 1:
            raise InputError("threshold: must be between 0 and 1, both excluded")
        if cap < 1:
            raise InputError("cap: must be at least 1")
        check_vocabularies(target, draft, "draft")
        if isinstance(verifier, str):
            verifier = load_speculator(verifier, draft)
        self.verifier, self.draft = _checked(verifier, draft, target), draft
        self.output, self.threshold, self.cap = verifier.output_of(ratio), threshold, cap
        self.reader = Reader(draft)
        compile_like(draft, target)

    def _extra_rows(self) -> int:
        return self.cap + 1

    def _begin(self, contexts: list[Context]) -> None:
        self.reader.begin(contexts[0].cache.capacity, len(contexts))

    def _leave(self, kept: list[int]) -> None:
        self.reader.leave(kept)

    def _first(self, lines, firsts, start, rows, ids) -> None:
        for first in firsts:
            self._emit(lines[first.place], first.token, drafted=False)

    def _step(self, lines: list[Line], cache: StepCache, clock: Clock) -> None:
        """One run of each sequence, and the forward of the target that ends it."""
        before = [len(line.answer.ids) for line in lines]
        with clock.share("draft"):
            doubted = self._run_ahead(lines)
        asking = [place for place, line in enumerate(lines) if line.answer.finished is None]
        for place, (line, doubt) in enumerate(zip(lines, doubted, strict=True)):
            ended = "end" if place not in asking else "cap" if doubt is None else "doubt"
            line.runs.append(Run(len(line.answer.ids) - before[place], ended))
        if not asking:
            return
        unseen = [
            line.context.tokens[seen:] if place in asking else []
            for place, (line, seen) in enumerate(zip(lines, cache.lengths, strict=True))
        ]
        with clock.share("verify"):
            probabilities = self._ask(unseen, cache)
        for place in asking:
            line, last = lines[place], probabilities[place]
            line.count(len(unseen[place]))
            if doubted[place] is None:
                self._emit(line, line.context.randomness.draw(last), drafted=False)
            else:
                self._judge(line, last, *doubted[place])

    def _run_ahead(self, lines: list[Line]) -> list[tuple[int, torch.Tensor] | None]:
        """Draft until every run has ended. Returns each one's token in doubt, which is not yet
        part of the text, and the distribution it was drawn from; None where the run ended
        otherwise."""
        texts = [line.context.tokens for line in lines]
        doubted: list[tuple[int, torch.Tensor] | None] = [None] * len(lines)
        running = self._with_room(lines, range(len(lines)))
        for _ in range(self.cap):
            if not running:
                break
            unread = self.reader.unread(texts)
            fed = [own if place in running else [] for place, own in enumerate(unread)]
            normed = self.draft.norm(self.reader.read(fed)[running])
            logits = self.draft.logits_of_normed(normed)
            drawn_from = self.sampling.probabilities(logits).cpu()
            tokens = [
                lines[place].context.randomness.draw(own)
                for place, own in zip(running, drawn_from, strict=True)
            ]
            for place, token, own, kept in zip(
                running, tokens, drawn_from, self._acceptable(normed, logits, tokens), strict=True
            ):
                if kept:
                    self._emit(lines[place], token, drafted=True)
                else:
                    doubted[place] = token, own
            going = [place for place in running if doubted[place] is None]
            running = self._with_room(lines, going)
        return doubted

    def _acceptable(
        self, normed: torch.Tensor, logits: torch.Tensor, tokens: list[int]
    ) -> list[bool]:
        """What the verifier says of a token drawn from each row of (P, V) logits; normed: (P, D)
        states."""
        drawn = on_device(tokens, normed.device)
        features = self.verifier.features.of_drawn(normed, drawn, logits)
        scores = self.verifier(features)[:, self.output]
        return (scores.sigmoid() >= self.threshold).tolist()

    def _with_room(self, lines: list[Line], places) -> list[int]:
        """Those whose text may go on and still fits the draft model."""
        longest = self.draft.max_positions
        return [
            place
            for place in places
            if lines[place].answer.finished is None and len(lines[place].context.tokens) <= longest
        ]

    def _ask(self, unseen: list[list[int]], cache: StepCache) -> torch.Tensor:
        """(B, V): the target's distribution after all that it had not seen; commits that."""
        device, width = self.target.device, max(map(len, unseen))
        if self.target.compiled is not None:
            width = self.cap + 1
        ids = on_device([own + [0] * (width - len(own)) for own in unseen], device)
        positions = on_device(cache.lengths, device)[:, None] + torch.arange(width, device=device)
        positions = positions.clamp(max=self.target.max_positions - 1)
        causal = causal_mask(width, device).repeat(len(unseen), 1, 1)
        mask = tree_mask(cache.lengths, causal, cache.slots)
        rows = self.target.forward(ids, positions, mask, cache, repeats=True)
        cache.commit_each([list(range(len(own))) for own in unseen])
        last = rows.hidden[range(len(unseen)), [max(0, len(own) - 1) for own in unseen]]
        return self.sampling.probabilities(self.target.logits(last)).cpu()

    def _judge(
        self, line: Line, probabilities: torch.Tensor, token: int, drawn_from: torch.Tensor
    ) -> None:
        """Keep the token in doubt, or draw another: one step of exact verification."""
        randomness = line.context.randomness
        kept = randomness.accept(min(1.0, float(probabilities[token] / drawn_from[token])))
        if not kept:
            token = randomness.draw(residual(probabilities, token, drawn_from))
        self._emit(line, token, drafted=kept)

    def _emit(self, line: Line, token: int, drafted: bool) -> None:
        line.answer.emit(token, drafted)
        line.context.tokens.append(token)


def _checked(verifier: nn.Module, draft: Target, target: Target) -> SprinterVerifier:
    """The verifier, if it is one and belongs to these models."""
    if verifier.kind != SprinterVerifier.kind:
        raise InputError(
            f"verifier: a speculator of kind {verifier.kind!r} is no SPRINTER verifier; train one "
            "with experiment=sprinter_small"
        )
    features = verifier.features
    if features.draft.hidden_size != draft.hidden_size:
        raise InputError(
            f"verifier: it was trained on states of width {features.draft.hidden_size}, and the "
            f"draft model's have {draft.hidden_size}; train one for this draft model"
        )
    judged = verifier.config.judged
    if judged and target.fingerprint and judged != target.fingerprint:
        raise InputError(
            "verifier: it was trained to judge drafts for another target; train one for this one"
        )
    return verifier
