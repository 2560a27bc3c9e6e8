"""Quality of answers against references, in percent: ROUGE and exact match of SQL queries.

ROUGE: Lin, ROUGE (2004), as computed by the package rouge-score. Exact match: the
customary one of WikiSQL. It knows nothing of how the answers were made.
"""

import re

import numpy as np
import torch

SQL_TOKEN = re.compile(r"'(?:[^']|'')*'|\w+|[^\s\w]")


def rouge(kind: str, predictions: list[str], references: list[list[str]]) -> list[float]:
    """F1 of each prediction in percent, with its best reference.

    kind: 'rouge1' (words in common), 'rougeL' (longest common subsequence of words) or 'rougeLsum'
    (the same by lines); lower case, without punctuation or stemming. ROUGE-L of 'the cat sat'
    against 'The cat sat down.': 3 words in common, precision 3/3, recall 3/4 and F1 6/7, so 85.7.
    Raises ValueError for lists of different lengths and for a prediction without references.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([kind])
    return [
        100 * max(scorer.score(known, prediction)[kind].fmeasure for known in good)
        for prediction, good in zip(predictions, references, strict=True)
    ]


def normalised_sql(query: str) -> list[str]:
    """The tokens of `query` that exact match compares: words, quoted values, single signs.

    "SELECT  Name FROM t WHERE a>3;" -> ['select', 'name', 'from', 't', 'where', 'a', '>', '3']

    Case is folded in keywords, identifiers and values alike. Whitespace between tokens is dropped;
    inside a quoted value it counts as one blank. One semicolon at the end is dropped. All else
    counts: the order of columns and conditions, brackets, and whether a value is quoted.
    """
    query = re.sub(r"\s+", " ", query.casefold()).strip().removesuffix(";")
    return SQL_TOKEN.findall(query)


def sql_exact_match(predictions: list[str], references: list[list[str]]) -> list[float]:
    """100 for each predicted query that equals one of its references, else 0; `normalised_sql`.

    ['select a from T', 'SELECT b FROM t'] against [['SELECT a FROM t'], ['SELECT c FROM t']] gives
    [100.0, 0.0]. Raises ValueError for lists of different lengths.
    """
    return [
        100.0 * (normalised_sql(prediction) in map(normalised_sql, good))
        for prediction, good in zip(predictions, references, strict=True)
    ]


def paired_bootstrap(ours: list[float], theirs: list[float], seed: int = 0) -> tuple[float, float]:
    """95 % interval of mean(ours) - mean(theirs) over rows drawn again, 10,000 times.

    The two lists are scores of the same rows in the same order (ValueError otherwise).
    """
    differences = torch.tensor(
        [a - b for a, b in zip(ours, theirs, strict=True)], dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(differences), (10_000, len(differences)), generator=generator)
    means = differences[drawn].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def ratio_interval(
    ours: tuple[list[float], list[float]], theirs: tuple[list[float], list[float]], seed: int = 0
) -> tuple[float, float, float]:
    """Ratio of two rates and its 95 % interval, over rows drawn again, 2,000 times, in pairs.

    ours, theirs: amounts and seconds of the same rows (at least one). 6 tokens in 2 s and 6 in 1 s,
    against 3 and 3 in as long, are twice as fast whatever is drawn:

    >>> ratio_interval(([6, 6], [2, 1]), ([3, 3], [2, 1]))
    (2.0, 2.0, 2.0)
    """
    pairs = np.array([*ours, *theirs], dtype=float)
    drawn = np.random.default_rng(seed).integers(pairs.shape[1], size=(2_000, pairs.shape[1]))
    sums = np.concatenate([pairs.sum(1)[:, None], pairs[:, drawn].sum(2)], axis=1)
    ratios = (sums[0] / sums[1]) / (sums[2] / sums[3])
    low, high = np.quantile(ratios[1:], [0.025, 0.975])
    return float(ratios[0]), float(low), float(high)
