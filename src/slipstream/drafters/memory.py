"""How much memory the dictionaries take that drafts are looked up in."""

import sys
from collections.abc import Iterable


def bytes_of(stores: Iterable[object]) -> int:
    """Of dicts, lists and tuples of numbers, with all that is in them, each object once."""
    seen: set[int] = set()
    total, waiting = 0, list(stores)
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        total += sys.getsizeof(part)
        if isinstance(part, dict):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            waiting += part
    return total
