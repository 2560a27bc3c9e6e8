"""Sampling with the shipped small target: every drafter of `conf/drafter/` keeps its distribution.

The first two tokens after a prompt are drawn many times at temperature 1. Pairs that are expected
often enough are counted one by one, all others together, and compared by a chi-square test.
"""

from collections import Counter

import pytest
import torch
from tests.commands import ROOT, config_of

from slipstream.configuration import build
from slipstream.core import verification
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.request import Batch

DRAFTERS = sorted(path.stem for path in (ROOT / "conf" / "drafter").glob("*.yaml"))
PROMPT = (  # the answer's second token may be any column, so a wrong rule shows; n-grams know one
    "CREATE TABLE table_1_341_2 (player VARCHAR, team VARCHAR, points INTEGER, year INTEGER)\n"
    "Question: What is it?\nSELECT year"
)
NUM_DRAWS, LEAST_EXPECTED = 600, 5.0


@pytest.fixture(scope="module")
def target():
    return build(config_of("infer").target)


@pytest.fixture(scope="module")
def expected(target) -> dict[tuple[int, int], float]:
    """Expected counts of the frequent pairs, from two plain forwards."""
    prompt = render_prompt(target.tokenizer, PROMPT)
    first = next_token_probabilities(target, [prompt])[0]
    likely = (first * NUM_DRAWS >= LEAST_EXPECTED).nonzero().flatten().tolist()
    second = next_token_probabilities(target, [[*prompt, token] for token in likely])
    counts = {}
    for token, row in zip(likely, second, strict=True):
        pairs = NUM_DRAWS * first[token] * row
        for after in (pairs >= LEAST_EXPECTED).nonzero().flatten().tolist():
            counts[token, after] = float(pairs[after])
    return counts


@torch.inference_mode()
def next_token_probabilities(target, rows: list[list[int]]) -> torch.Tensor:
    ids = torch.tensor(rows)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = target.forward(ids, positions, None, None).hidden[:, -1]
    return target.logits(hidden).double().softmax(-1)


def p_value(target, expected: dict[tuple[int, int], float], name: str) -> tuple[float, int]:
    """Of the pairs that `Engine` draws with the drafter called `name`, seeds 0 and up; and how many
    drafted tokens were accepted."""
    drafter = build(config_of("infer", f"drafter={name}").drafter)
    engine = Engine(target, drafter, Sampling(temperature=1.0), Limits(3), budget=8)
    prompt = render_prompt(target.tokenizer, PROMPT)
    answers = [engine.generate(prompt, seed) for seed in range(NUM_DRAWS)]
    accepted = sum(
        answer.statistics.tokens - 1 - answer.statistics.target_forwards for answer in answers
    )
    drawn = Counter(tuple(answer.ids[:2]) for answer in answers)
    cells = [(drawn.pop(pair, 0), count) for pair, count in expected.items()]
    cells.append((drawn.total(), NUM_DRAWS - sum(expected.values())))
    statistic = sum((found - count) ** 2 / count for found, count in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])), accepted


@pytest.mark.parametrize("name", DRAFTERS)
def test_pairs_of_tokens_have_the_targets_distribution(target, expected, name):
    assert len(expected) >= 4
    p, accepted = p_value(target, expected, name)
    assert p > 1e-3 and accepted > 0.05 * NUM_DRAWS


def test_a_wrong_residual_is_noticed(target, expected, monkeypatch):
    """A rejected token that stays possible is drawn too often."""
    monkeypatch.setattr(verification, "residual", lambda remaining, _: remaining)
    assert p_value(target, expected, "draft_model")[0] < 1e-6


def test_one_number_for_two_depths_is_noticed(target, expected, monkeypatch):
    points = Batch.points
    monkeypatch.setattr(
        Batch,
        "points",
        lambda batch, numbers, depths: points(batch, numbers, torch.zeros_like(depths)),
    )
    assert p_value(target, expected, "unispec")[0] < 1e-6
