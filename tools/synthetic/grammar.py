"""A small grammar that draws random text: each kind of text has a few weighted patterns.

    date = {month} {1-28}, {1990-2013} *3 | {1-28} {month}

`{month}` is text of another kind, `{1-28}` a whole number in that range (both ends included), `*3`
the weight of a pattern (1 without). It knows nothing of what the text is for.
"""

import re
from collections.abc import Callable
from itertools import accumulate
from random import Random

Piece = str | tuple[int, int]


def weighted(table: dict, rng: Random):
    """A key of `table`, its values are weights: {'a': 3, 'b': 1} gives 'a' three times in four."""
    return rng.choices(list(table), list(table.values()))[0]


def parse_rules(text: str) -> dict[str, tuple[list[str], list[float]]]:
    """Patterns and cumulative weights of each kind.

    'size = {1-9} cm *2 | tall' -> {'size': (['{1-9} cm', 'tall'], [2, 3])}

    A line that begins with `|` continues the rule above it.
    """
    rules = {}
    for rule in re.sub(r"\n\s*\|", " |", text.strip()).splitlines():
        kind, _, body = rule.partition(" = ")
        matches = [re.fullmatch(r"(.*?)(?: \*(\d+))?", option) for option in body.split(" | ")]
        weights = accumulate(int(match[2] or 1) for match in matches)
        rules[kind.strip()] = [match[1].strip() for match in matches], list(weights)
    return rules


def parse_pattern(pattern: str) -> list[Piece]:
    """Texts and slots in turn: 'No. {1-9} {noun}' -> ['No. ', (1, 9), ' ', 'noun', '']."""
    pieces: list[Piece] = re.split(r"\{(.*?)\}", pattern)
    for index in range(1, len(pieces), 2):
        if ends := re.fullmatch(r"(\d+)-(\d+)", pieces[index]):
            pieces[index] = (int(ends[1]), int(ends[2]))
    return pieces


class Grammar:
    """Draws text by kind.

    rules: the text described above. words: kinds that are one of a list of words.
    functions: kinds that are computed. Raises KeyError when a rule uses a kind nobody defines.
    """

    def __init__(
        self,
        rules: str,
        words: dict[str, list[str]],
        functions: dict[str, Callable[[Random], str]],
    ):
        self.words, self.functions = words, functions
        self.rules = {
            kind: ([parse_pattern(pattern) for pattern in patterns], weights)
            for kind, (patterns, weights) in parse_rules(rules).items()
        }
        for patterns, _ in self.rules.values():
            for slot in (slot for pattern in patterns for slot in pattern[1::2]):
                if isinstance(slot, str) and slot not in self:
                    raise KeyError(slot)

    def __contains__(self, kind: str) -> bool:
        return kind in self.rules or kind in self.words or kind in self.functions

    def draw(self, kind: str, rng: Random) -> str:
        """Random text of `kind`."""
        if kind in self.words:
            return rng.choice(self.words[kind])
        if kind in self.functions:
            return self.functions[kind](rng)
        patterns, weights = self.rules[kind]
        text = []
        for index, piece in enumerate(rng.choices(patterns, cum_weights=weights)[0]):
            if index % 2 == 0:
                text.append(piece)
            elif isinstance(piece, str):
                text.append(self.draw(piece, rng))
            else:
                text.append(str(rng.randint(*piece)))
        return "".join(text)
