"""Quality of answers against references, in percent: ROUGE and exact match of SQL queries.

ROUGE: Lin, ROUGE (2004), as computed by the package rouge-score. Exact match: WikiSQL's own.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 2_000
SQL_TOKEN = re.compile(r"'(?:[^']|'')*'|\w+|[^\s\w]")


def rouge(kind: str, prediction: str, references: list[str]) -> float:
    """F1 of a prediction in percent, with its best reference.

    kind: 'rouge1' (words in common), 'rougeL' (longest common subsequence of words) or 'rougeLsum'
    (the same by lines); lower case, without punctuation or stemming. ROUGE-L of 'the cat sat'
    against 'The cat sat down.': 3 words in common, precision 3/3, recall 3/4 and F1 6/7, so 85.7.
    Raises ValueError where there is no reference.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([kind])
    return 100 * max(scorer.score(known, prediction)[kind].fmeasure for known in references)


def normalised_sql(query: str) -> list[str]:
    """The tokens of `query` that exact match compares: words, quoted values, single signs.

    "SELECT  Name FROM t WHERE a>3;" -> ['select', 'name', 'from', 't', 'where', 'a', '>', '3']

    Case is folded in keywords, identifiers and values alike. Whitespace between tokens is dropped;
    inside a quoted value it counts as one blank. One semicolon at the end is dropped. All else
    counts: the order of columns and conditions, brackets, and whether a value is quoted.
    """
    query = re.sub(r"\s+", " ", query.casefold()).strip().removesuffix(";")
    return SQL_TOKEN.findall(query)


def sql_exact_match(prediction: str, references: list[str]) -> float:
    """100 for a predicted query that equals one of its references, else 0; `normalised_sql`.

    >>> sql_exact_match("select a from T", ["SELECT b FROM t", "SELECT a FROM t"])
    100.0
    """
    return 100.0 * (normalised_sql(prediction) in map(normalised_sql, references))


def bootstrap(statistic: Callable, *columns: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a statistic over rows drawn again, 2,000 times (scipy's, percentiles).

    columns: numbers of the same rows in the same order; statistic: of such columns, as arrays, and
    the axis along which their rows are. A single row says nothing of chance: both ends are its own.
    """
    from scipy import stats

    arrays = [np.asarray(column, dtype=float) for column in columns]
    if len(arrays[0]) < 2:
        return (float(statistic(*arrays, axis=-1)),) * 2
    how = dict(paired=True, vectorized=True, method="percentile", n_resamples=RESAMPLES, rng=0)
    found = stats.bootstrap(arrays, statistic, **how).confidence_interval
    return float(found.low), float(found.high)


def rate_interval(amounts: Sequence[float], units: Sequence[float]) -> tuple[float, float]:
    """95 % interval of sum(amounts) / sum(units), such as tokens per forward or per second;
    ValueError where no row has units."""
    least, usual = min(each for each in units if each), sum(amounts) / sum(units)

    def rate(amounts, units, axis=-1):
        total = units.sum(axis)  # 0 where the rows drawn have none, which say nothing
        return np.where(total > 0, amounts.sum(axis) / np.maximum(total, least), usual)

    return bootstrap(rate, amounts, units)


def ratio_interval(
    ours: tuple[Sequence[float], Sequence[float]], theirs: tuple[Sequence[float], Sequence[float]]
) -> tuple[float, float, float]:
    """Ratio of two rates and its 95 % interval.

    ours, theirs: amounts and seconds of the same rows (at least one). 6 tokens in 2 s and 6 in 1 s,
    against 3 and 3 in as long, are twice as fast whatever is drawn:

    >>> ratio_interval(([6, 6], [2, 1]), ([3, 3], [2, 1]))
    (2.0, 2.0, 2.0)
    """

    def ratio(a, s, b, t, axis=-1):
        return (a.sum(axis) / s.sum(axis)) / (b.sum(axis) / t.sum(axis))

    columns = [np.asarray(column, dtype=float) for column in (*ours, *theirs)]
    return float(ratio(*columns)), *bootstrap(ratio, *columns)
