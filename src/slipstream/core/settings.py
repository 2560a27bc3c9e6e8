"""What a setting may be, said once: in its annotation.

A YAML mirrors one constructor. Its annotations (types, and bounds of `annotated_types`) are what
`check` holds against what is given: for every node of a config before anything is built, and for
`Settings` whenever one is made. What concerns several fields, a class checks after them.
"""

import difflib
import inspect
import reprlib
from collections import namedtuple
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple, fields
from functools import cache, wraps
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from slipstream.core.errors import InputError

try:
    from annotated_types import Ge, Gt, Le, Len, Lt
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
    from pydantic_core import core_schema
except ImportError:  # where nothing can be installed (studies/gpu.py): bounds are said, not checked
    Ge = Gt = Le = Lt = Len = namedtuple("Bound", ["least", "most"], defaults=[None])
    ConfigDict, TypeAdapter = dict, None

# Above every count that a machine could serve, and within 32 bits: no product of two overflows.
MOST = 2**31 - 1
Count = Annotated[int, Ge(1), Le(MOST)]
Amount = Annotated[int, Ge(0), Le(MOST)]
# A side of a matrix, a level of a tree: a thousand times more would fit no memory.
Size = Annotated[int, Ge(1), Le(65536)]
Rank = Annotated[int, Ge(0), Le(65536)]
# What torch, NumPy and Python's own generator all take.
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
# Nodes of a tree: each sees its ancestors through a mask with a row for each.
Budget = Annotated[int, Ge(1), Le(4096)]
NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
PositiveShare = Annotated[float, Gt(0), Le(1)]
Below1 = Annotated[float, Ge(0), Lt(1)]
Inside = Annotated[float, Gt(0), Lt(1)]
AtLeast1 = Annotated[float, Ge(1)]
Text = Annotated[str, Len(1)]

WORDS = {int: "a whole number", float: "a finite number", bool: "true or false"}
WORDS |= {str: "a text", dict: "a mapping", NoneType: "null"}
# Annotations in place of those of other packages' constructors, which say less than holds.
NARROWED: dict[Callable, dict[str, object]] = {}
STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)


class Settings:
    """Base of dataclasses whose fields are checked when they are made. section: of the config,
    which errors name.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Tree(Settings):
    ...     section = "tree"
    ...     top_k: Annotated[int, Ge(1)]
    >>> Tree(0)
    Traceback (most recent call last):
    slipstream.core.errors.InputError: tree.top_k: must be a whole number, at least 1; 0 was given
    """

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        # a class may have a constructor of its own before that of its fields
        declared = (each for each in type(self).__mro__ if "__dataclass_fields__" in vars(each))
        check(next(declared), given, self.section)

    @classmethod
    def __get_pydantic_core_schema__(cls, *_) -> "core_schema.CoreSchema":
        return core_schema.is_instance_schema(cls)  # its own fields were checked when it was made


def check(
    component: Callable, given: Mapping[str, object], path: str = "", later: Collection[str] = ()
) -> None:
    """Raise `InputError` unless `component` may be called with `given`; path: its place in the
    config; later: required arguments that `given` may lack, since they come from elsewhere."""
    if TypeAdapter is None:
        return
    allowed, before = arguments_of(component), f"{path}." if path else ""
    for name in sorted(given):
        if name not in allowed:
            raise InputError(f"{before}{name}: unknown config key; {nearest(name, allowed)}")
    for name, (adapter, annotation, required) in allowed.items():
        if name not in given:
            if required and name not in later:
                raise InputError(f"{before}{name}: is missing; it must be {expected(annotation)}")
            continue
        try:
            adapter.validate_python(given[name])
        except ValidationError as error:
            raise InputError(
                f"{before}{name}: must be {expected(annotation)}; {shown(given[name])} was given"
            ) from error


@cache
def arguments_of(component: Callable) -> dict[str, tuple["TypeAdapter", object, bool]]:
    """By name: what checks an argument, its annotation, and whether it must be given."""
    found = {}
    for name, parameter in inspect.signature(component).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        untold = parameter.annotation is parameter.empty
        annotation = Any if untold else parameter.annotation
        annotation = NARROWED.get(component, {}).get(name, annotation)
        own = isinstance(annotation, type) and issubclass(annotation, Settings)
        try:
            adapter = TypeAdapter(annotation, config=None if own else STRICT)
        except (PydanticUserError, NameError):  # of another package: a name that it alone knows
            adapter, annotation = TypeAdapter(Any), Any
        found[name] = adapter, annotation, parameter.default is parameter.empty
    return found


def checked(function: Callable) -> Callable:
    """`function`, whose arguments are checked at every call."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args, **kwargs):
        check(function, signature.bind(*args, **kwargs).arguments)
        return function(*args, **kwargs)

    return call


@contextmanager
def set_to(variable: ContextVar, value: object) -> Iterator[None]:
    """Within (or as a decorator), the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def nearest(name: object, known: Sequence[str] | Mapping[str, object]) -> str:
    """What to write in place of a name that is not known.

    >>> nearest("top_q", ["budget", "top_k"])
    "did you mean 'top_k'? known are budget, top_k"
    """
    close = difflib.get_close_matches(str(name), list(known), 1)
    said = f"did you mean {close[0]!r}? " if close else ""
    return f"{said}known are {', '.join(sorted(known))}" if known else "there are none here"


def expected(annotation: object) -> str:
    """What an annotation allows, in words.

    >>> expected(Annotated[int, Ge(1)] | None)
    'a whole number, at least 1, or null'
    >>> expected(list[Share] | Literal["auto"])
    'a list whose items are each a finite number, at least 0 and at most 1, or auto'
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        said = expected(inner[0])
        for length in [each for each in inner[1:] if isinstance(each, Len)]:
            some = "non-empty " if length.max_length is None else f"{length.max_length}-item "
            said = f"a {some}{said.removeprefix('a ')}"
        bounds = " and ".join(filter(None, map(_bound, inner[1:])))
        return f"{said}, {bounds}" if bounds else said
    if origin is Literal:
        return ("one of " if len(inner) > 1 else "") + ", ".join(map(str, inner))
    if origin is dict:
        return f"a mapping of names, each to {expected(inner[1])}"
    if origin is not None and isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list whose items are each {expected(inner[0])}"
    if inner and origin is not frozenset:  # a union
        null_last = sorted(inner, key=lambda each: each is NoneType)
        said = list(dict.fromkeys(map(expected, null_last)))
        long = any("," in each for each in said)
        return ", or ".join(said) if long else " or ".join(said)
    name = str(getattr(annotation, "__name__", annotation))
    return WORDS.get(annotation) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _bound(bound: object) -> str:
    word = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}.get(type(bound))
    return "" if word is None or bound == Le(MOST) else f"{word} {astuple(bound)[0]}"


def shown(value: object) -> str:
    """What was given, as a YAML has it, cut where it is long.

    >>> shown(None), shown([True]), shown("ab" * 40)
    ('null', '[true]', "'abababababab...babababababab'")
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value[:4]))}{', ...' if len(value) > 4 else ''}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str | int | float | Mapping):
        return reprlib.repr(value)
    return f"a {type(value).__name__}"
