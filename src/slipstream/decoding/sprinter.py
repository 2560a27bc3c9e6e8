"""SPRINTER: a small verifier decides when the target is asked at all (Algorithm 2). Approximate.

The draft model writes, one sampled token after the other, as long as the verifier holds them for
acceptable. At its first no the target reads, in one forward, all that it has not seen, and judges
the last token: it is kept with min(1, p/q), else drawn again from norm(max(0, p - q)). A run that
reaches `cap` tokens also ends with the target's forward, but its last token was not in doubt: it
stays, and the target's own next token follows. What is written has not the target's distribution.
"""

from collections.abc import Sequence
from os import PathLike

import torch

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling, distributions
from slipstream.core.settings import Inside, Positive, Share, Size, checked
from slipstream.core.transfer import on_device
from slipstream.core.trees import Trees
from slipstream.core.verification import NOT_FINITE, residual
from slipstream.decoding.answer import Limits, Run
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.request import Answering, Batch
from slipstream.drafters.base import Session, Verified
from slipstream.speculators.checkpoint import opened
from slipstream.speculators.classifiers import SprinterVerifier
from slipstream.targets.compiled import compile_like
from slipstream.targets.loading import of_same_vocabulary
from slipstream.targets.reading import CachedModel, read_on
from slipstream.targets.target import Target


class SprinterDecoder(Decoder):
    """Approximate decoding of `target`.

    verifier: trained for `draft` and `target`, or its folder; ratio: which of its lambdas;
    threshold: a token whose predicted probability of being acceptable is smaller is in doubt; cap:
    most tokens of a run. In place of a verifier a number is a control: the probability `kept` with
    which a token is kept, whatever it is; ratio and threshold are then of no use. Raises
    `InputError` for parts that do not belong together.
    """

    exact = False

    @checked
    def __init__(
        self,
        target: Target,
        draft: Target,
        verifier: SprinterVerifier | str | PathLike | Share,
        sampling: Sampling,
        limits: Limits,
        ratio: Positive,
        threshold: Inside,
        cap: Size,
    ):
        super().__init__(target, sampling, limits, budget=cap + 1)
        _check_sampled(sampling)
        draft = of_same_vocabulary(draft, target, "draft")
        self.draft, self.threshold, self.cap = draft, threshold, cap
        if isinstance(verifier, int | float):
            self.verifier, self.kept = None, float(verifier)
        else:
            self.verifier = opened(verifier, draft, SprinterVerifier, "verifier")
            width, judged = self.verifier.features.draft.hidden_size, self.verifier.config.judged
            known = self.verifier.features.draft.fingerprint
            if width != draft.hidden_size or (known and known != draft.fingerprint):
                raise InputError(
                    f"verifier: it was trained on states, of width {width}, of another draft model "
                    f"than this one (width {draft.hidden_size}); train one for this draft model"
                )
            says = judged or self.verifier is not verifier  # a trained one says of which target
            if says and target.fingerprint and judged != target.fingerprint:
                raise InputError(
                    "verifier: it was trained to judge drafts for another target; train one for "
                    "this one"
                )
            ratios = self.verifier.config.ratios
            if ratio not in ratios:
                raise InputError(
                    f"ratio: the verifier knows lambda {', '.join(map(str, ratios))} and not "
                    f"{ratio}; choose one of them, or train one with speculator.ratios=[{ratio}]"
                )
            self.output = ratios.index(ratio)
        compile_like(draft, target)

    def _session(self, requests: Sequence[Answering], longest: int) -> "_Reader":
        for request in requests:
            _check_sampled(request.sampling)
        return _Reader(self.draft, longest, len(requests), ahead=self.budget)

    def _step(self, batch: Batch) -> None:
        """One run of each request, and the forward of the target that ends it."""
        requests, before = batch.requests, [len(request.tokens) for request in batch.requests]
        with batch.clock.share("draft"):
            doubted, unseen = self._run_ahead(batch), []
        for place, (request, seen) in enumerate(zip(requests, batch.cache.lengths, strict=True)):
            ended = "end" if request.finished else "doubt" if place in doubted else "cap"
            request.runs.append(Run(len(request.tokens) - before[place], ended))
            unseen.append([] if request.finished else request.tokens[seen:])
        asking = [place for place, request in enumerate(requests) if not request.finished]
        if not asking:
            return
        with batch.clock.share("verify"):
            width = 0 if self.target.compiled is None else self.budget
            rows = read_on(self.target, unseen, batch.cache, width=width)
            ends = [max(0, len(own) - 1) for own in unseen]
            logits = self.target.logits(rows.hidden[range(len(ends)), ends])
            finite = logits.amax(-1).isfinite().tolist()
            probabilities = distributions([request.sampling for request in requests], logits)
            probabilities = probabilities.to(self.draft.device)
        for place in asking:
            request, last = requests[place], probabilities[place]
            if not finite[place]:
                request.emit(NOT_FINITE, drafted=False)
            elif place in doubted:
                # Keep the token in doubt, or draw another: one step of exact verification.
                (token, drawn_from), chance = doubted[place], request.chance
                kept = chance.accept(min(1.0, float(last[token] / drawn_from[token])))
                token = token if kept else chance.draw(residual(last, drawn_from))
                request.emit(token, drafted=kept)
            else:
                request.emit(request.chance.draw(last), drafted=False)
            request.count(len(unseen[place]), request.runs[-1].kept)

    def _run_ahead(self, batch: Batch) -> dict[int, tuple[int, torch.Tensor]]:
        """Draft until every run has ended; the verifier's word on each token is waited for.

        Returns, by the request's place, the token in doubt, which is not yet part of the text, and
        the distribution it was drawn from; nothing where the run ended otherwise.
        """
        requests, reader, running = batch.requests, batch.session, range(len(batch.requests))
        doubted: dict[int, tuple[int, torch.Tensor]] = {}
        for _ in range(self.cap):
            running = [place for place in running if self._goes_on(requests[place])]
            running = [place for place in running if place not in doubted]
            if not running:
                break
            unread = reader.unread([request.tokens for request in requests])
            fed = [own if place in running else [] for place, own in enumerate(unread)]
            normed = self.draft.norm(reader.read(fed)[running])
            logits = self.draft.logits_of_normed(normed)
            if not logits.amax(-1).isfinite().all():
                raise InputError(
                    "draft: its logits are not finite; give it another dtype, or another draft"
                )
            asking = [requests[place] for place in running]
            drawn_from = distributions([request.sampling for request in asking], logits)
            pairs = zip(asking, drawn_from, strict=True)
            tokens = [request.chance.draw(own) for request, own in pairs]
            verdicts = self._acceptable(asking, normed, logits, tokens)
            for place, token, own, kept in zip(running, tokens, drawn_from, verdicts, strict=True):
                if kept:
                    requests[place].emit(token, drafted=True)
                else:
                    doubted[place] = token, own
        return doubted

    def _acceptable(
        self, asking: list[Answering], normed: torch.Tensor, logits: torch.Tensor, tokens: list[int]
    ) -> list[bool]:
        """What the verifier says of a token drawn from each row of (P, V) logits; normed: (P, D)
        states; asking: whose rows these are."""
        if self.verifier is None:
            return [request.chance.accept(self.kept) for request in asking]
        drawn = on_device(tokens, normed.device)
        features = self.verifier.features.of_drawn(normed, drawn, logits)
        scores = self.verifier(features)[:, self.output]
        return (scores.sigmoid() >= self.threshold).tolist()

    def _goes_on(self, request: Answering) -> bool:
        """Whether the draft model may write on, and the text still fits it."""
        return not request.finished and len(request.tokens) <= self.draft.max_positions


def _check_sampled(sampling: Sampling) -> None:
    if sampling.greedy:
        raise InputError(
            "sampling.temperature: SPRINTER samples, as its verifier was trained to; set it above 0"
        )


class _Reader(CachedModel, Session):
    """The draft model, which reads along."""

    def draft(self, verified: Verified, budget: int) -> Trees:
        """Read the prompts, before other requests join."""
        verified.host()
        prompts = [request.tokens[:-1] for request in verified.requests]
        read = [own if len(own) < self.model.max_positions else [] for own in prompts]
        if any(read):
            with verified.wait():  # as in exact decoding, a part of the prefill
                self.read(read)
        return Trees.roots(verified.next_tokens)
