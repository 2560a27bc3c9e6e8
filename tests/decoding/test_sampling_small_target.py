"""Sampling on the shipped target with every drafter of `conf/drafter/` that needs no training.

Deterministic drafters give the answers of plain sampling with the same seeds. What plain sampling
and drawn drafts give is compared with the target's distribution: the first two tokens after a
prompt are drawn many times at temperature 1; pairs that are expected often enough are counted one
by one, all others together, and compared by a chi-square test.
"""

from collections import Counter

import pytest
import torch
from tests.commands import ROOT, config_of
from tests.exhaustive import sparing

from slipstream.configuration import build
from slipstream.core import verification
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder

DRAWN = "adaptive", "draft_model"
TRAINED = ("medusa",)
DETERMINISTIC = [
    path.stem
    for path in sorted((ROOT / "conf" / "drafter").glob("*.yaml"))
    if path.stem not in DRAWN + TRAINED
]
PROMPT = (  # the answer's second token may be any column, so a wrong rule shows; n-grams know one
    "CREATE TABLE table_1_341_2 (player VARCHAR, team VARCHAR, points INTEGER, year INTEGER)\n"
    "Question: What is it?\nSELECT year"
)
SEEDS = range(4)
# Texts of a corpus: enough to find some drafts in, and each is the target's own answer.
FEW_TEXTS = {
    name: f"drafter.{parts}retrieval.corpus.max_rows=16"
    for name, parts in (
        ("rest", ""),
        ("spectra_retrieval", ""),
        ("combined_untrained", "drafters.rest."),
    )
}
NUM_DRAWS, LEAST_EXPECTED = 600, 5.0
SAMPLING = Sampling(temperature=1.0)


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


def decoder_of(target, name: str, tokens: int) -> Decoder:
    if name == "plain":
        return PlainDecoder(target, SAMPLING, Limits(tokens))
    few = [FEW_TEXTS[name]] if name in FEW_TEXTS else []
    few += ["length=gammatune"] if name == "adaptive" else []
    drafter = build(config_of("infer", f"drafter={name}", *few).drafter)
    return Engine(target, drafter, SAMPLING, Limits(tokens), budget=8)


@pytest.fixture(scope="module")
def drawn(target) -> list[list[int]]:
    """Plain sampling's answers with `SEEDS`."""
    plain, prompt = decoder_of(target, "plain", 16), render_prompt(target.tokenizer, PROMPT)
    answers = [plain.generate(prompt, seed).ids for seed in SEEDS]
    assert len(set(map(tuple, answers))) > 2
    return answers


@pytest.mark.parametrize(
    ("name",),
    sparing(zip(DETERMINISTIC), lambda name: name in ("streaming", "auto")),
)
def test_a_seed_gives_the_answer_of_plain_sampling(target, drawn, name):
    """Also in float32: that rounding moves a boundary across one of so few numbers is unlikely."""
    engine, prompt = decoder_of(target, name, 16), render_prompt(target.tokenizer, PROMPT)
    answers = [engine.generate(prompt, seed) for seed in SEEDS]
    assert [answer.ids for answer in answers] == drawn
    assert sum(answer.statistics.drafted for answer in answers) > 0


def p_value(target, expected: dict[tuple[int, int], float], name: str) -> tuple[float, int]:
    """Of the pairs drawn with seeds 0 and up; and how many drafted tokens were accepted."""
    decoder = decoder_of(target, name, 3)
    prompt = render_prompt(target.tokenizer, PROMPT)
    answers = [
        answer
        for start in range(0, NUM_DRAWS, 50)
        for answer in decoder.generate_batch([prompt] * 50, list(range(start, start + 50)))
    ]
    drawn = Counter(tuple(answer.ids[:2]) for answer in answers)
    cells = [(drawn.pop(pair, 0), count) for pair, count in expected.items()]
    cells.append((drawn.total(), NUM_DRAWS - sum(expected.values())))
    statistic = sum((found - count) ** 2 / count for found, count in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    accepted = sum(answer.statistics.drafted for answer in answers)
    return float(torch.special.gammaincc(half[0], half[1])), accepted


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["plain", *DRAWN])
def test_pairs_of_tokens_have_the_targets_distribution(target, expected, name):
    assert len(expected) >= 4
    p, accepted = p_value(target, expected, name)
    assert p > 1e-3 and (accepted > 0.05 * NUM_DRAWS or name == "plain")


@pytest.mark.exhaustive
def test_a_wrong_residual_is_noticed(target, expected, monkeypatch):
    """A rejected token that stays possible is drawn too often."""
    monkeypatch.setattr(verification, "residual", lambda remaining, _: remaining)
    assert p_value(target, expected, "draft_model")[0] < 1e-6
