"""What a question means, and the spelling it keeps to: casing of headers and values, tense, quotes.

It knows the phrases of phrases.py, but not how a whole question is built from them.
"""

from dataclasses import dataclass
from random import Random

from tools.synthetic import phrases
from tools.synthetic.columns import Column

PLAIN, COUNT = "", "COUNT"


@dataclass(frozen=True)
class Condition:
    """A condition of WHERE; `operator` is '=', '>' or '<'."""

    column: Column
    operator: str
    value: str


@dataclass(frozen=True)
class Intent:
    """What is asked: '', COUNT, MAX, MIN, AVG or SUM of column `wanted`. `subject`: of the rows."""

    subject: str
    aggregate: str
    wanted: Column
    conditions: tuple[Condition, ...]


def plural(noun: str) -> str:
    """'city' -> 'cities', 'loss' -> 'losses', 'wins' -> 'wins'."""
    if not noun[-1].isalpha() or (noun.endswith("s") and not noun.endswith("ss")):
        return noun
    if noun.endswith(("ss", "ch", "sh", "x")):
        return noun + "es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def with_article(noun: str) -> str:
    """'opponent' -> 'an opponent'."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun


def capitalised(text: str) -> str:
    """'may 3' -> 'May 3'; the rest stays as it is."""
    return text[:1].upper() + text[1:]


def listed(items: list[str], last: str) -> str:
    """['x', 'y', 'z'], ', and ' -> 'x, y, and z'."""
    return last.join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else items[0]


def phrase_for(table: dict, column: Column, rng: Random) -> str | None:
    """A phrase of `table` for this column, by its identifier or else its kind."""
    found = table.get(column.identifier) or table.get(column.kind)
    return rng.choice(found) if found else None


class Wording:
    """One question's intent in the spelling that it keeps to from start to end."""

    def __init__(self, intent: Intent, rng: Random):
        self.intent, self.rng = intent, rng
        self.header_case = rng.choices(("lower", "as is", "title"), (6, 2, 2))[0]
        self.lower_values = rng.random() < 0.5
        self.quotes = False
        past = rng.random() < 0.27
        self.be, self.have = ("was", "had") if past else ("is", "has")

    def header(self, column: Column) -> str:
        if self.header_case == "lower" and column.header.upper() != column.header:
            return column.header.lower()
        if self.header_case == "title":
            return " ".join(map(capitalised, column.header.split(" ")))
        return column.header

    def value(self, condition: Condition) -> str:
        text = condition.value.lower() if self.lower_values else condition.value
        title = condition.column.kind == "title" and self.rng.random() < 0.4
        return f'"{text}"' if self.quotes or title else text

    def compared(self, condition: Condition) -> str:
        """The value with its comparison: 'larger than 9', 'after 1998', or '9' when equal."""
        if condition.operator == "=":
            return self.value(condition)
        by_year = condition.column.kind == "year" and self.rng.random() < 0.5
        table = phrases.YEAR_COMPARISONS if by_year else phrases.COMPARISONS
        return f"{self.rng.choice(table[condition.operator])} {self.value(condition)}"

    def measured(self, condition: Condition) -> str:
        """Header and value: 'Crowd of 9,000' or 'Crowd larger than 9,000'."""
        of = "of " if condition.operator == "=" else ""
        return f"{self.header(condition.column)} {of}{self.compared(condition)}"

    def wanted(self) -> str:
        """What is sought: 'venue', 'lowest rank', 'sum of the points', 'number of teams'."""
        header, aggregate = self.header(self.intent.wanted), self.intent.aggregate
        if aggregate == PLAIN:
            return header
        by_year = self.intent.wanted.kind == "year" and aggregate in phrases.YEAR_SUPERLATIVES
        table = phrases.YEAR_SUPERLATIVES if by_year else phrases.SUPERLATIVES
        noun = plural(header) if aggregate == COUNT else header
        return f"{self.rng.choice(table[aggregate])} {noun}"

    def pronoun(self) -> str:
        """'Who' for people, else 'What'."""
        kind, aggregate = self.intent.wanted.kind, self.intent.aggregate
        person = aggregate == PLAIN and kind in ("person", "surname", "couple", "player_points")
        return "Who" if person and self.rng.random() < 0.95 else "What"

    def linked(self, *openings: str) -> str:
        """All conditions in one manner: 'with a gold of 2 and a silver smaller than 5'.

        `openings`: only manners that begin with one of these.
        """
        conditions = self.intent.conditions
        equal = all(condition.operator == "=" for condition in conditions)
        links = phrases.LINKS + (phrases.EQUAL_LINKS if equal else ())
        links = [link for link in links if not openings or link[1].startswith(openings)]
        _, opening, form = self.rng.choices(links, [link[0] for link in links])[0]
        items = []
        for condition in conditions:
            fitting = form if condition.operator == "=" else form.replace(" of ", " ")
            header, value = self.header(condition.column), self.compared(condition)
            item = fitting.format(a=with_article(header), c=header, v=value, be=self.be)
            items.append(item)
        last = self.rng.choice((", and ", " and ", ", "))
        return opening.format(have=self.have) + listed(items, last)

    def natural(self) -> str:
        """All conditions in the words of their columns: 'against Ashford on May 3, 1998'."""
        parts = []
        for condition in self.intent.conditions:
            phrase = phrase_for(phrases.CONDITIONS, condition.column, self.rng)
            value = self.compared(condition)
            if condition.operator != "=":
                if value.startswith(("after", "before")):
                    phrase = "{}"
                elif phrase is None or not phrase.startswith("with {} "):
                    phrase = f"with {with_article(self.header(condition.column))} {{}}"
            elif phrase is None:
                phrase = f"with {with_article(self.header(condition.column))} of {{}}"
            parts.append(phrase.replace("{}", value))
        return self.rng.choice((" ", " and ")).join(parts)
