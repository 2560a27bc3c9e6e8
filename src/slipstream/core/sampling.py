"""The one place that turns logits into probabilities, and the one source of uniform numbers.

Tokens are drawn by inverse CDF, each with the number that belongs to its place in the answer, so
that a seed gives the answer of plain sampling, however the answer is drafted. A vocabulary is not
sorted, nor its probabilities added up one by one: what is looked for is found in two steps, first
its block of tokens and then its place there. Nothing here waits for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from slipstream.core.settings import Count, NotNegative, PositiveShare, Settings
from slipstream.core.transfer import on_device

BLOCK = 512
"""Tokens of a block: about the root of a large vocabulary."""
SIBLINGS = 4
"""Most drawn siblings."""
DIGIT = 15
"""Bits of a digit: probabilities, at most 1, have two in float32 and five in float64."""

COLDEST = 1e-20
"""Least temperature to sample at: here all probability is the likeliest token's (even the next
float64 has none), and far below it logits divided by it would not be finite."""


@dataclass(frozen=True)
class Sampling(Settings):
    """How tokens are chosen: greedy at temperature 0 (and below `COLDEST`), else temperature, then
    top-k, then top-p."""

    section = "sampling"
    temperature: NotNegative = 0.0
    top_k: Count | None = None
    top_p: PositiveShare | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """(..., V) logits -> (..., V) probabilities, at least float32.

        Top-p keeps the smallest set of most probable tokens whose mass reaches `top_p`, at least
        one. Greedy, all probability is the likeliest token's.

        >>> Sampling(1.0, top_k=1).probabilities(torch.tensor([0.0, 2.0])).tolist()
        [0.0, 1.0]
        """
        if self.greedy:
            return F.one_hot(likeliest(logits), logits.shape[-1]).float()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperature != 1:
            logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k).values[..., -1:]
            logits = torch.where(logits < smallest, -torch.inf, logits)
        probabilities = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            probabilities = torch.where(nucleus(probabilities, self.top_p), probabilities, 0.0)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities

    def choose(self, logits: torch.Tensor, points: torch.Tensor | None) -> torch.Tensor:
        """(..., V) logits -> (...) tokens: the likeliest, or drawn with the (...) uniform numbers
        `points` (None for greedy decoding)."""
        return likeliest(logits) if self.greedy else draw(self.probabilities(logits), points)


def distributions(samplings: Sequence[Sampling], logits: torch.Tensor) -> torch.Tensor:
    """(B, ..., V) logits of requests -> the distributions that their tokens are drawn from; of
    greedy ones all probability is the likeliest token's."""
    return _each(samplings, Sampling.probabilities, logits)


def choose(
    samplings: Sequence[Sampling], logits: torch.Tensor, points: torch.Tensor | None = None
) -> torch.Tensor:
    """(B, M, V) logits of requests -> (B, M) tokens; points: (B, M) uniform numbers, None if all
    requests are greedy."""
    if points is None:
        return likeliest(logits)
    return _each(samplings, Sampling.choose, logits, points)


def _each(samplings: Sequence[Sampling], of: Callable, *given: torch.Tensor) -> torch.Tensor:
    """`of` (sampling, rows of what is given), once per sampling; rows in request order."""
    if len(set(samplings)) == 1:
        return of(samplings[0], *given)
    groups, order = _places_of(tuple(samplings), given[0].device)
    found = [of(sampling, *(rows[own] for rows in given)) for sampling, own in groups.items()]
    return torch.cat(found)[order]


@lru_cache
def _places_of(
    samplings: tuple[Sampling, ...], device: torch.device
) -> tuple[dict[Sampling, torch.Tensor], torch.Tensor]:
    """The requests of each sampling, and where each request then stands."""
    groups: dict[Sampling, list[int]] = {}
    for place, sampling in enumerate(samplings):
        groups.setdefault(sampling, []).append(place)
    order = torch.tensor([place for own in groups.values() for place in own]).argsort()
    with torch.inference_mode(False):  # they are kept
        places = {sampling: on_device(own, device) for sampling, own in groups.items()}
        return places, on_device(order, device)


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """(..., V) logits -> (...): argmax, the first of equal ones; over a large vocabulary many times
    as fast on a CPU."""
    if logits.is_cuda or logits.shape[-1] <= 8 * BLOCK:
        return logits.argmax(-1)
    highest = torch.cat([part.amax(-1) for part in _blocks(logits)], -1)
    places = _places(highest.argmax(-1, keepdim=True), logits)
    return places.gather(-1, logits.gather(-1, places).argmax(-1, keepdim=True))[..., 0]


def draw(probabilities: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """One token of each (..., V) distribution, by inverse CDF in float64, from (...) `points` in
    [0, 1).

    >>> draw(torch.tensor([[0.5, 0.0, 0.5]]), torch.tensor([0.5])).tolist()
    [2]
    """
    sums = _sums(probabilities)
    return _passing(probabilities, sums, points * sums[..., -1])[0]


def nucleus(probabilities: torch.Tensor, mass: float) -> torch.Tensor:
    """(..., V) bool: the smallest sets of most probable tokens whose probabilities, summed in
    float64, reach `mass`; among equal probabilities the first tokens.

    A radix search: positive floats are ordered as their bits are, so the bits of a set's least
    probable token are found `DIGIT` at a time, highest first, from the summed mass of each digit.

    >>> nucleus(torch.tensor([0.2, 0.3, 0.3, 0.2]), 0.7).tolist()
    [True, True, True, False]
    """
    double, masses = probabilities.dtype == torch.float64, probabilities.double()
    bits = probabilities.view(torch.int64 if double else torch.int32)
    limits = _just_below(masses.new_full(bits.shape[:-1], mass))
    end, digits = 1 << DIGIT, 1 << DIGIT
    for shift in range(4 * DIGIT if double else DIGIT, -1, -DIGIT):
        # Place 0: tokens above the digits found so far; next places: by this digit, highest first.
        order = (end - (bits >> shift)).clamp_(0, digits + 1).long()
        ordered = masses.new_zeros(*bits.shape[:-1], digits + 2).scatter_add_(-1, order, masses)
        place, left = _passing(ordered, _sums(ordered), limits)
        least = (end - place.clamp(1, digits)[..., None]).to(bits.dtype)
        end = least + 1 << DIGIT
    equal = bits == least
    tied = torch.where(equal, probabilities, 0.0)
    last, _ = _passing(tied, _sums(tied), left)
    tokens = torch.arange(bits.shape[-1], device=bits.device)
    return (bits > least) | (equal & (tokens <= last[..., None]))


def _passing(
    weights: torch.Tensor, sums: torch.Tensor, limits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(...) the first place of each (..., V) where the running sum of the weights exceeds (...)
    `limits`, at most the last place with a weight; and (...) the limit less the sum before it.

    sums: of `_sums`.
    """
    limits = torch.minimum(limits, _just_below(sums[..., -1]))[..., None]
    block = torch.searchsorted(sums, limits, right=True)
    places = _places(block, weights)
    left = limits - F.pad(sums, (1, 0)).gather(-1, block)
    within = weights.gather(-1, places).double().cumsum(-1)
    left = torch.minimum(left, _just_below(within[..., -1:]))
    # Where nothing is a number nothing is found; the place must be one all the same.
    found = torch.searchsorted(within, left, right=True).clamp(max=BLOCK - 1)
    left = left - F.pad(within, (1, 0)).gather(-1, found)
    return places.gather(-1, found)[..., 0], left[..., 0]


def _sums(weights: torch.Tensor) -> torch.Tensor:
    """(..., V) weights -> (..., blocks): sums of all up to the end of each block, in float64."""
    sums = [part.sum(-1, dtype=torch.float64) for part in _blocks(weights)]
    return torch.cat(sums, -1).cumsum(-1)


def _blocks(values: torch.Tensor) -> list[torch.Tensor]:
    """(..., V) -> views (..., blocks, `BLOCK`) and, if it is shorter, the last one, (..., 1, R)."""
    whole = values.shape[-1] // BLOCK
    parts = [values[..., : whole * BLOCK].unflatten(-1, (whole, BLOCK))]
    if whole * BLOCK < values.shape[-1]:
        parts.append(values[..., None, whole * BLOCK :])
    return parts


def _places(block: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(..., 1) number of a block -> (..., `BLOCK`) its places in (..., V); where the block is
    shorter, its last place is repeated."""
    places = block * BLOCK + torch.arange(BLOCK, device=values.device)
    return places.clamp(max=values.shape[-1] - 1)


def _just_below(numbers: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(numbers, torch.zeros_like(numbers))


class Chance:
    """The uniform numbers of one request, by its seed alone.

    decide: (count,) float64, one for each token of the answer: with it the token is drawn from the
    target's distribution, whatever is drafted. keep: (count, `SIBLINGS`), whether drawn draft
    tokens in this place stay. All other numbers, for what is drawn in order to draft, come from a
    stream of their own; trees must depend on nothing else.
    """

    def __init__(self, seed: int, count: int):
        seed = (seed ^ (seed >> 32) * 0x9E3779B1) % 2**32  # a generator takes no more bits of it
        streams = torch.randint(2**31, (4,), generator=torch.Generator().manual_seed(seed))
        decide, keep, self._drafting, others = (
            torch.Generator().manual_seed(stream) for stream in streams.tolist()
        )
        self.decide = torch.rand(count, dtype=torch.float64, generator=decide)
        first = torch.rand(count, 1, dtype=torch.float64, generator=keep)
        more = torch.rand(count, SIBLINGS - 1, dtype=torch.float64, generator=others)
        self.keep = torch.cat([first, more], 1)

    def number(self) -> torch.Tensor:
        """A scalar, for drafting."""
        return self.numbers(1)[0]

    def numbers(self, count: int) -> torch.Tensor:
        """(count,), for drafting."""
        return torch.rand(count, dtype=torch.float64, generator=self._drafting)

    def draw(self, probabilities: torch.Tensor) -> int:
        """An index drawn from (V,) `probabilities`; waits for their device."""
        return int(draw(probabilities, self.number().to(probabilities.device)))

    def accept(self, probability: float) -> bool:
        """True with `probability`."""
        return float(self.number()) < probability
