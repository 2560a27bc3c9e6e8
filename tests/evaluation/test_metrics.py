"""ROUGE-L and exact match of SQL on worked examples."""

import pytest

from slipstream.evaluation.metrics import normalised_sql, rouge_l, sql_exact_match


def test_rouge_l_worked_example():
    assert rouge_l(["the cat sat"], [["The cat sat down."]]) == pytest.approx(600 / 7)


def test_rouge_l_takes_the_best_reference_and_averages_over_predictions():
    assert rouge_l(["a b", ""], [["c d", "a b"], ["a b"]]) == pytest.approx(50.0)


def test_rouge_l_of_words_in_another_order():
    assert rouge_l(["b a"], [["a b"]]) == pytest.approx(50.0)


def test_normalised_sql_worked_example():
    query = "SELECT  Name FROM t WHERE a>3;"
    assert normalised_sql(query) == ["select", "name", "from", "t", "where", "a", ">", "3"]


def test_sql_exact_match_worked_example():
    predictions = ["select a from T", "SELECT b FROM t"]
    assert sql_exact_match(predictions, [["SELECT a FROM t"], ["SELECT c FROM t"]]) == 50.0


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
    assert sql_exact_match([prediction], [["SELECT other FROM t", reference]]) == percent


@pytest.mark.parametrize("metric", [rouge_l, sql_exact_match])
def test_lists_that_do_not_fit_raise(metric):
    with pytest.raises(ValueError):
        metric([], [])
    with pytest.raises(ValueError):
        metric(["a"], [["a"], ["b"]])
