"""ROUGE and exact match of SQL on worked examples."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slipstream.evaluation.comparison import scores
from slipstream.evaluation.metrics import (
    bootstrap,
    normalised_sql,
    rate_interval,
    rouge,
    sql_exact_match,
)
from slipstream.evaluation.prompts import Prompt


def test_rouge_l_worked_example():
    assert rouge("rougeL", "the cat sat", ["The cat sat down."]) == pytest.approx(600 / 7)


def test_rouge_takes_the_best_reference():
    assert rouge("rougeL", "a b", ["c d", "a b"]) == pytest.approx(100.0)
    assert rouge("rougeL", "", ["a b"]) == 0
    with pytest.raises(ValueError):
        rouge("rougeL", "a b", [])


def test_the_kinds_of_rouge_differ_in_how_they_see_order_and_lines():
    assert rouge("rougeL", "b a", ["a b"]) == pytest.approx(50.0)
    assert rouge("rouge1", "b a", ["a b"]) == pytest.approx(100.0)
    assert rouge("rougeLsum", "b\na", ["a\nb"]) == pytest.approx(100.0)


def test_normalised_sql_worked_example():
    query = "SELECT  Name FROM t WHERE a>3;"
    assert normalised_sql(query) == ["select", "name", "from", "t", "where", "a", ">", "3"]


@pytest.mark.parametrize(
    ("prediction", "reference", "percent"),
    [
        ("SELECT COUNT( a ) FROM t", "SELECT COUNT(a) FROM t", 100.0),
        ("SELECT a FROM t WHERE b = 'New\n  York'", "SELECT a FROM t WHERE b='new york'", 100.0),
        ("SELECT a FROM t WHERE b = 'o''neil'", "select a from t where b = 'O''Neil' ;", 100.0),
        ("SELECT a FROM t WHERE b = 'newyork'", "SELECT a FROM t WHERE b = 'new york'", 0.0),
        ("SELECT a FROM t WHERE b = 3", "SELECT a FROM t WHERE b = '3'", 0.0),
        ("SELECT a FROM t WHERE b = 1 AND c = 2", "SELECT a FROM t WHERE c = 2 AND b = 1", 0.0),
        ("SELECT a FROM t WHERE b = 'cut of", "SELECT a FROM t WHERE b = 'cut off'", 0.0),
        ("", "SELECT a FROM t", 0.0),
    ],
)
def test_what_sql_exact_match_normalises(prediction, reference, percent):
    assert sql_exact_match(prediction, ["SELECT other FROM t", reference]) == percent


def test_prompts_without_references_have_no_scores():
    prompts = [Prompt("x", "set", references) for references in (("a b",), (), ("c",))]
    answers = [SimpleNamespace(text=text) for text in ("a b", "a b", "d")]
    found = scores(answers, prompts)
    assert found["rouge_1"] == [pytest.approx(100), None, 0] and found["exact_match"][1] is None
    assert set(scores(answers[1:2], prompts[1:2]).values()) == {None}


def test_the_bootstrap_tells_a_difference_from_noise():
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0))
    theirs = 10 * noise.double().numpy()
    low, high = bootstrap(np.mean, (theirs + 1.0) - theirs)
    assert low == pytest.approx(1.0) and high == pytest.approx(1.0)
    ours = torch.randn(400, generator=torch.Generator().manual_seed(1)).tolist()
    low, high = bootstrap(np.mean, ours)
    assert low < 0 < high and high - low == pytest.approx(2 * 1.96 / 20, rel=0.15)


def test_answers_without_a_forward_say_nothing_of_a_rate():
    """Drawn alone, which happens among few, they would make it no number."""
    assert rate_interval([0, 4, 6], [0, 2, 2]) == rate_interval([4, 6], [2, 2]) == (2.0, 3.0)
    low, high = rate_interval([18, 18, 18], [2, 2, 0])  # one that never asked counts, too
    assert low == 9 and high >= 27
