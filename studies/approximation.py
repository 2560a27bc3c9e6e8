"""How far SPRINTER's tokens are from the target's, and what its theorems say of that.

At every position that was drafted, the distribution of what was emitted there is computed exactly
from both models' distributions and from what the verifier says of every token of the vocabulary.
Nothing here is drawn at random.
"""

from dataclasses import dataclass

import torch

from slipstream.data.labelled_drafts import states
from slipstream.decoding.answer import Generation
from slipstream.decoding.sprinter import SprinterDecoder
from slipstream.speculators.classifiers import DraftFeatures, shape_of
from studies.sprinter_theory import Rates, mean_run_length, total_variation


@dataclass(frozen=True)
class Approximation:
    """Sums over answers, of which rates are made.

    tokens: emitted; positions: of them drafted, kept by the verifier or judged by the target;
    kept, doubts: tokens that the verifier kept and doubted. Over drafted positions: distance:
    d_TV(p, p_S) of what was emitted; pair_distance: d_TV(p, q); by_prefix: d_TV(p, q) times the
    eta_FP of the same position; acceptable: probability that a drafted token has q <= p;
    kept_acceptable, kept_others: that it is kept, and is or is not acceptable.
    """

    tokens: int = 0
    positions: int = 0
    kept: int = 0
    doubts: int = 0
    distance: float = 0.0
    pair_distance: float = 0.0
    by_prefix: float = 0.0
    acceptable: float = 0.0
    kept_acceptable: float = 0.0
    kept_others: float = 0.0

    def __add__(self, other: "Approximation") -> "Approximation":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Approximation(*(own + added for own, added in pairs))

    @property
    def distance_of_answers(self) -> float:
        """d_TV(p, p_S), the mean over all emitted tokens, those of the target's own included."""
        return self.distance / max(1, self.tokens)

    def columns(self) -> dict[str, float | None]:
        """What was measured over drafted positions, for lambda = 1, beside the theorems.

        'eta_FP by prefix': Theorem 1 at each position with its own eta_FP. 'kept a doubt': tokens
        kept for each that was doubted, None where none was. Theorem 2: its mean over r, where each
        of the first r tokens was acceptable with the same probability; 'memoryless': a token after
        an unacceptable one may be acceptable again. Rates are just below 1 where they are 1.
        """
        most, places = 1 - 1e-9, max(1, self.positions)
        true = min(most, self.kept_acceptable / max(self.acceptable, 1e-9))
        false = min(most, self.kept_others / max(self.positions - self.acceptable, 1e-9))
        share = self.acceptable / places
        yes = share * true + (1 - share) * false
        return {
            "eta_TP": true,
            "eta_FP": false,
            "d_TV(p, q)": self.pair_distance / places,
            "distance": self.distance / places,
            "Theorem 1": false * self.pair_distance / places,
            "eta_FP by prefix": self.by_prefix / places,
            "kept a doubt": self.kept / self.doubts if self.doubts else None,
            "Theorem 2": mean_run_length(Rates(true, false), min(share, most)),
            "memoryless": yes / (1 - yes),
        }


def emitted_distribution(p: torch.Tensor, q: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """(..., V) what SPRINTER emits, from target p and draft q, both (..., V).

    kept: (..., V), whether, or how probably, the verifier keeps each token. One in doubt stays with
    min(1, p/q), else one of norm(max(0, p - q)) takes its place. If the verifier keeps nothing:

    >>> p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])
    >>> emitted_distribution(p, q, torch.tensor([False, False])).tolist()
    [0.75, 0.25]
    >>> emitted_distribution(p, q, torch.tensor([False, True])).tolist()
    [0.25, 0.75]
    """
    stays = torch.lerp(torch.minimum(p, q), q, kept.to(q))
    missing = (p - q).clamp(min=0)
    total = missing.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return stays + (1 - stays.sum(-1, keepdim=True)) * missing / total


def drafted_positions(answer: Generation) -> list[int]:
    """Which tokens of an answer were drafted: all but the first and those that followed a cap.

    >>> from slipstream.decoding.answer import Run
    >>> from slipstream.decoding.statistics import Statistics
    >>> runs = (Run(2, "doubt"), Run(1, "cap"), Run(1, "end"))
    >>> drafted_positions(Generation([9, 8, 7, 6, 5, 4, 3], "", "end", Statistics(), runs))
    [1, 2, 3, 4, 6]
    """
    places, place = [], 1
    for run in answer.runs:
        judged = run.kept + (run.ended == "doubt")
        places += range(place, place + judged)
        place += judged + (run.ended == "cap")
    return places


@torch.inference_mode()
def approximation(decoder: SprinterDecoder, prompt: list[int], answer: Generation) -> Approximation:
    """Of an answer that `decoder` gave to `prompt`."""
    places = drafted_positions(answer)
    if not places:
        return Approximation(len(answer.ids))
    draft, target, verifier = decoder.draft, decoder.target, decoder.verifier
    text, before = prompt + answer.ids[:-1], [len(prompt) + place - 1 for place in places]
    normed = draft.norm(states(draft, [text])[0, before])
    logits = draft.logits_of_normed(normed)
    q = decoder.sampling.probabilities(logits).double()
    judging = target.logits(states(target, [text])[0, before])
    p = decoder.sampling.probabilities(judging).double().to(q.device)
    if verifier is None:
        verdicts = torch.full_like(q, decoder.kept)
    else:
        scores = [
            verifier(_features_of_all(verifier.features, *each))[:, decoder.output]
            for each in zip(normed, logits, strict=True)
        ]
        verdicts = (torch.stack(scores).sigmoid() >= decoder.threshold).to(q)  # (P, V)
    good, emitted, apart = q <= p, emitted_distribution(p, q, verdicts), total_variation(p, q)
    kept_others = (q * verdicts * ~good).sum(-1)
    false_positive = kept_others / (q * ~good).sum(-1).clamp(min=1e-12)
    sums = (
        total_variation(p, emitted), apart, false_positive * apart, q * good,
        q * verdicts * good, kept_others,
    )  # fmt: skip
    kept = sum(run.kept for run in answer.runs)
    doubts = sum(run.ended == "doubt" for run in answer.runs)
    counts = len(answer.ids), len(places), kept, doubts
    return Approximation(*counts, *(each.sum().item() for each in sums))


def _features_of_all(
    features: DraftFeatures, normed: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """(V, size) of every token of the vocabulary, were it drawn at one place: the state (D), after
    the final norm, and the logits (V,)."""
    count, tokens = len(logits), torch.arange(len(logits), device=logits.device)
    logs = logits.float().log_softmax(-1)
    return features(normed.expand(count, -1), tokens, shape_of(logs).expand(count, -1), logs)
