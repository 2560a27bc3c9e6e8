"""Quality of answers against references, in percent: ROUGE-L and exact match of SQL queries.

ROUGE-L: Lin, ROUGE (2004), section 3, as computed by the package rouge-score. Exact match: the
customary one of WikiSQL. It knows nothing of how the answers were made.
"""

import re
from statistics import fmean

SQL_TOKEN = re.compile(r"'(?:[^']|'')*'|\w+|[^\s\w]")


def rouge_l(predictions: list[str], references: list[list[str]]) -> float:
    """Mean F1 of ROUGE-L in percent; each prediction counts with its best reference.

    The longest common subsequence of words, in lower case, without punctuation or stemming:
    'the cat sat' against 'The cat sat down.' has 3 words in common, precision 3/3, recall 3/4 and
    F1 6/7, so 85.7. Raises ValueError for no predictions, for lists of different lengths and for a
    prediction without references.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    return 100 * fmean(
        max(scorer.score(known, prediction)["rougeL"].fmeasure for known in good)
        for prediction, good in zip(predictions, references, strict=True)
    )


def normalised_sql(query: str) -> list[str]:
    """The tokens of `query` that exact match compares: words, quoted values, single signs.

    "SELECT  Name FROM t WHERE a>3;" -> ['select', 'name', 'from', 't', 'where', 'a', '>', '3']

    Case is folded in keywords, identifiers and values alike. Whitespace between tokens is dropped;
    inside a quoted value it counts as one blank. One semicolon at the end is dropped. All else
    counts: the order of columns and conditions, brackets, and whether a value is quoted.
    """
    query = re.sub(r"\s+", " ", query.casefold()).strip().removesuffix(";")
    return SQL_TOKEN.findall(query)


def sql_exact_match(predictions: list[str], references: list[list[str]]) -> float:
    """Percent of predicted queries that equal one of their references, see `normalised_sql`.

    ['select a from T', 'SELECT b FROM t'] against [['SELECT a FROM t'], ['SELECT c FROM t']]: 50.0.
    Raises ValueError for no predictions and for lists of different lengths.
    """
    return 100 * fmean(
        normalised_sql(prediction) in map(normalised_sql, good)
        for prediction, good in zip(predictions, references, strict=True)
    )
