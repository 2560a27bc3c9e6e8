"""Sampling: every combination of options against plain Python, ties, bad arguments, draws."""

import math

import pytest
import torch

from slipstream.core.errors import InputError
from slipstream.core.sampling import BLOCK, Chance, Sampling, draw, likeliest


def reference(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> list[float]:
    """Temperature, then top-k (ties of the last one stay), then top-p (ties by token id)."""
    scaled = [logit / temperature for logit in logits]
    allowed = set(range(len(scaled)))
    if top_k is not None:
        worst = sorted(scaled, reverse=True)[min(top_k, len(scaled)) - 1]
        allowed = {token for token in allowed if scaled[token] >= worst}
    largest = max(scaled)
    weights = {token: math.exp(scaled[token] - largest) for token in allowed}
    total = sum(weights.values())
    probabilities = {token: weight / total for token, weight in weights.items()}
    if top_p is not None:
        mass, nucleus = 0.0, set()
        for token in sorted(probabilities, key=lambda token: (-probabilities[token], token)):
            if mass >= top_p:
                break
            nucleus.add(token)
            mass += probabilities[token]
        probabilities = {token: probabilities[token] / mass for token in nucleus}
    return [probabilities.get(token, 0.0) for token in range(len(scaled))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 3, 9, 50])
@pytest.mark.parametrize("top_p", [None, 1e-6, 0.4, 0.9, 1.0])
def test_probabilities_agree_with_plain_python(temperature, top_k, top_p):
    logits = torch.randn(4, 3, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = Sampling(temperature, top_k, top_p).probabilities(3 * logits)
    for row, line in zip(3 * logits.flatten(0, 1), found.flatten(0, 1), strict=True):
        expected = reference(row.tolist(), temperature, top_k, top_p)
        assert line.tolist() == pytest.approx(expected, abs=1e-13)
        assert float(line.sum()) == pytest.approx(1.0, abs=1e-13)


def test_ties_at_the_edge():
    even = torch.zeros(4, dtype=torch.float64)
    assert Sampling(1.0, top_k=2).probabilities(even).tolist() == [0.25] * 4
    assert Sampling(1.0, top_p=0.5).probabilities(even).tolist() == [0.5, 0.5, 0.0, 0.0]
    pair = torch.tensor([0.0, 3.0, 1.0, 3.0], dtype=torch.float64)
    assert Sampling(1.0, top_k=1).probabilities(pair).tolist() == [0.0, 0.5, 0.0, 0.5]
    assert Sampling(1.0, top_k=1, top_p=0.5).probabilities(pair).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_half_precision_logits_give_float32_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = Sampling(1.0).probabilities(logits.to(dtype))
        assert found.dtype == torch.float32 and torch.equal(found, logits.softmax(-1))


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-21, 1e-20, 1e-9])
def test_tiny_temperatures_are_greedy(temperature):
    logits = torch.tensor([[3.0, -40.0, 1e6, 1e6 - 1], [2.0, -math.inf, 0.0, 1.9]])
    cold = Sampling(temperature, top_p=0.9)
    assert torch.equal(cold.probabilities(logits), Sampling().probabilities(logits))
    assert cold.choose(logits, torch.tensor([0.1, 0.9]).double()).tolist() == [2, 0]


def test_forbidden_tokens_stay_forbidden():
    logits = torch.tensor([1.0, -math.inf, 0.5, -math.inf], dtype=torch.float64)
    for sampling in (Sampling(0.7), Sampling(0.7, top_k=3), Sampling(0.7, top_p=0.99)):
        found = sampling.probabilities(logits)
        assert found[1] == found[3] == 0 and float(found.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("temperature", dict(temperature=-0.1)),
        ("temperature", dict(temperature=math.nan)),
        ("temperature", dict(temperature=math.inf)),
        ("top_k", dict(temperature=1.0, top_k=0)),
        ("top_k", dict(temperature=1.0, top_k=-3)),
        ("top_p", dict(temperature=1.0, top_p=0.0)),
        ("top_p", dict(temperature=1.0, top_p=1.1)),
        ("top_p", dict(temperature=1.0, top_p=-0.5)),
        ("top_p", dict(temperature=1.0, top_p=math.nan)),
    ],
)
def test_bad_arguments_name_their_field(field, arguments):
    with pytest.raises(InputError, match=rf"^sampling\.{field}: "):
        Sampling(**arguments)


def test_temperature_0_is_greedy():
    assert Sampling().greedy and not Sampling(0.5).greedy


def test_draws_follow_the_distribution_and_never_leave_it():
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    points = torch.arange(4000, dtype=torch.float64) / 4000
    counts = draw(probabilities.expand(4000, -1), points).bincount(minlength=6)
    assert counts[[0, 2, 5]].sum() == 0
    assert (counts / 4000 - probabilities).abs().max() < 0.001
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw(probabilities.expand(2, -1), ends).tolist() == [1, 4]
    half = torch.tensor([0.25, 0.75], dtype=torch.bfloat16)
    assert draw(half, torch.tensor(0.25)).item() == 1


def test_acceptance_follows_its_probability():
    chance = Chance(2, 0)
    assert sum(chance.accept(0.3) for _ in range(4000)) / 4000 == pytest.approx(0.3, abs=0.03)
    assert all(chance.accept(1.0) for _ in range(200))
    assert not any(chance.accept(0.0) for _ in range(200))


def test_a_seed_decides_everything():
    probabilities = torch.full((7,), 1 / 7)

    def numbers(seed: int) -> list:
        chance = Chance(seed, 5)
        drawn = [(chance.draw(probabilities), chance.accept(0.5)) for _ in range(30)]
        return [*drawn, *chance.decide.tolist(), *chance.keep.tolist()]

    assert numbers(3) == numbers(3)
    seeds = 3, 4, (1 << 32) + 3, (2 << 32) + 3  # torch's generators would keep 32 bits of them
    assert len({str(numbers(seed)) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("count", [1, 7, 16, 33, 500])
def test_the_numbers_of_a_place_do_not_depend_on_the_length_of_the_answer(count):
    short, long = Chance(5, count), Chance(5, 1000)
    assert torch.equal(short.decide, long.decide[:count])
    assert torch.equal(short.keep, long.keep[:count])
    assert not torch.equal(long.decide, long.keep[:, 0])
    assert float(short.number()) == float(long.number())


def test_greedy_sampling_chooses_the_likeliest_token():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert Sampling().choose(logits, None).tolist() == [1]
    assert Sampling().probabilities(logits).tolist() == [[0.0, 1.0, 0.0]]
    number = torch.tensor([0.0], dtype=torch.float64)
    assert Sampling(1.0).choose(logits, number).tolist() == [0]


SIZES = 3, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK + 7


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_blocks_find_what_one_pass_over_the_vocabulary_finds(size, dtype):
    """In bfloat16 many tokens are equally probable."""
    random = torch.Generator().manual_seed(size)
    logits = torch.randn(2, 20, size, generator=random, dtype=torch.float64).to(dtype)
    points = torch.rand(2, 20, generator=random, dtype=torch.float64)
    assert torch.equal(likeliest(logits), logits.argmax(-1))
    probabilities = Sampling(0.7).probabilities(logits)
    sums = probabilities.double().cumsum(-1)
    found = torch.searchsorted(sums, (points * sums[..., -1])[..., None], right=True)[..., 0]
    assert torch.equal(draw(probabilities, points), found)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.95, 1 - 1e-12])
def test_the_nucleus_is_that_of_sorted_probabilities(size, dtype, top_p):
    random = torch.Generator().manual_seed(size)
    logits = torch.randn(2, 5, size, generator=random, dtype=torch.float64).to(dtype)
    probabilities = Sampling(1.0).probabilities(logits)
    ordered, order = probabilities.sort(descending=True, stable=True)
    masses = ordered.double().cumsum(-1)
    inside = masses - ordered < top_p
    kept = torch.zeros_like(inside).scatter(-1, order, inside)
    expected = probabilities * kept / (probabilities * kept).sum(-1, keepdim=True)
    found = Sampling(1.0, top_p=top_p).probabilities(logits)
    assert torch.allclose(found, expected, rtol=1e-6, atol=0 if top_p < 0.99 else 1e-9)
