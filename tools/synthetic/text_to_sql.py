"""Text-to-SQL prompts: an invented table's `CREATE TABLE` statement and a question over it.

The form is that of WikiSQL prompts in the sql-create-context style, where the statement lists the
columns that questions need. It knows nothing of the answer, which the target writes.
"""

from random import Random

from tools.synthetic.columns import OTHERS, SPORTS, Column, free_column
from tools.synthetic.grammar import weighted
from tools.synthetic.questions import ask
from tools.synthetic.values import VALUES
from tools.synthetic.wording import COUNT, PLAIN, Condition, Intent

# Weights like those of the real tables and questions. Part 1 of that set counts more often, part 2
# compares and puts several conditions.
NUM_COLUMNS = {2: 50, 3: 104, 4: 245, 5: 355, 6: 157, 7: 57, 8: 20, 9: 9, 10: 3}
NUM_DIGITS = {8: 767, 7: 190, 6: 33, 5: 10}
AGGREGATES = {
    1: {PLAIN: 650, COUNT: 180, "MIN": 80, "MAX": 80, "AVG": 5, "SUM": 5},
    2: {PLAIN: 676, COUNT: 54, "MIN": 72, "MAX": 68, "AVG": 68, "SUM": 62},
}  # MIN to SUM a little more often than there: tables without numbers get none of them
NUM_CONDITIONS = {1: {0: 20, 1: 914, 2: 62, 3: 4}, 2: {0: 5, 1: 610, 2: 304, 3: 72, 4: 11}}
COMPARING = {1: 0.03, 2: 0.5}  # conditions on numeric columns that are not equalities
SPORTS_SHARE = 0.55
FREE_TABLES, FREE_COLUMNS = 0.12, 0.14  # tables put together freely, and columns of the others
WELL_QUERIED = 0.36  # tables where other questions made most numeric columns INTEGER


def table_name(rng: Random, part: int) -> str:
    """'table_2_16388398_1': `part` of the data set, number of a page, of a table on it."""
    digits = weighted(NUM_DIGITS, rng)
    lowest = 10 ** (digits - 1)
    highest = lowest * ((3 if part == 1 else 2) if digits == 8 else 9)
    number = 1 if rng.random() < 0.17 else min(int(rng.expovariate(0.25)), 45) + 1
    return f"table_{part}_{rng.randrange(lowest, highest)}_{number}"


def draw_columns(rng: Random) -> tuple[str, list[Column]]:
    """What a row is called, and the columns of one table in their order."""
    count = weighted(NUM_COLUMNS, rng)
    topic = rng.choice(SPORTS if rng.random() < SPORTS_SHARE else OTHERS)
    columns: list[Column] = []
    if rng.random() > FREE_TABLES:
        kept = sorted(rng.sample(range(len(topic.columns)), min(count, len(topic.columns))))
        columns = [
            free_column(rng, rng.random() < 0.4)
            if rng.random() < FREE_COLUMNS
            else topic.columns[index]
            for index in kept
        ]
    while len(columns) < count:
        columns.insert(rng.randint(0, len(columns)), free_column(rng, rng.random() < 0.4))
    return rng.choice(topic.subjects), columns


def draw_condition(rng: Random, part: int, column: Column) -> Condition:
    compares = column.numeric and column.kind != "par" and rng.random() < COMPARING[part]
    return Condition(column, rng.choice("<>") if compares else "=", VALUES.draw(column.kind, rng))


def draw_intent(rng: Random, part: int, subject: str, columns: list[Column]) -> Intent:
    """A question's meaning over `columns`: what is sought, under which conditions."""
    aggregate = weighted(AGGREGATES[part], rng)
    num_conditions = weighted(NUM_CONDITIONS[part], rng)
    if num_conditions == 0 and aggregate == PLAIN:
        aggregate = COUNT
    numeric = [column for column in columns if column.numeric]
    if aggregate not in (PLAIN, COUNT) and not numeric:
        aggregate = PLAIN if num_conditions else COUNT
    wanted = rng.choice(columns if aggregate in (PLAIN, COUNT) else numeric)
    others = [column for column in columns if column is not wanted]
    picked = rng.sample(others, min(num_conditions, len(others)))
    return Intent(subject, aggregate, wanted, tuple(draw_condition(rng, part, c) for c in picked))


def column_types(rng: Random, columns: list[Column], intent: Intent) -> list[str]:
    """INTEGER for the columns that the question reckons with, and for some more numeric ones."""
    reckoned = [condition.column for condition in intent.conditions if condition.operator != "="]
    if intent.aggregate not in (PLAIN, COUNT):
        reckoned.append(intent.wanted)
    share = 0.8 if rng.random() < WELL_QUERIED else 0.04
    return [
        "INTEGER" if column in reckoned or (column.numeric and rng.random() < share) else "VARCHAR"
        for column in columns
    ]


def draw_prompt(rng: Random) -> str:
    """One prompt, such as

    CREATE TABLE table_2_16388398_1 (home_team VARCHAR, crowd INTEGER, date VARCHAR)
    Question: What was the highest crowd when the home team was Ashford?
    """
    part = 1 if rng.random() < 0.28 else 2
    subject, columns = draw_columns(rng)
    columns = list({column.identifier: column for column in columns}.values())
    intent = draw_intent(rng, part, subject, columns)
    types = column_types(rng, columns, intent)
    fields = ", ".join(f"{c.identifier} {kind}" for c, kind in zip(columns, types, strict=True))
    return f"CREATE TABLE {table_name(rng, part)} ({fields})\nQuestion: {ask(intent, rng)}"
