"""Bounds what rendering a template may build, and how long it may take.

Jinja's sandbox keeps templates away from Python's internals. It does not stop ``"x" * 10 ** 10`` or five nested
loops. So loops, calls, filters and growing operators charge a budget for what they build. Before a call in C that
could build or compute without end, its result is estimated, since nothing interrupts such a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import chain, islice
from time import monotonic
from types import BuiltinMethodType
from typing import Any

from jinja2 import UndefinedError

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.templates.views import unwrapped
from noetl_dagster.settings import get_settings

_SLICE = 8 * 1024
"""Bytes after which a rendering looks at the clock."""

SMALL = 4096
"""Texts up to this length cost nothing: templates are short, so only few of them are built."""

FEW = 200

_BITS = 14_000
"""The largest integers; Python refuses to write those above 4,300 digits."""

_LEVELS = 100
CONTAINERS = frozenset({list, tuple, dict, set, frozenset})
_WIDTHS = re.compile(r"\d{4,}")
_WIDE = re.compile(r"\d{4}|\*")
_RUNS = re.compile(r"\s+|\S+")

SHARING = frozenset({"batch", "groupby", "map", "slice"})
"""Filters that may put one value into many places: what they fill gaps with, or a default."""

_SHARED = ("default", "default_value", "fill_with")
_SHORT = 16
_MOST_GENERATED = 100_000


class Budget:
    """The part of a template's context that counts. It costs nothing until something is charged."""

    _left = _granted = _used = 0
    _began = 0.0
    _extents: dict[int, tuple[int, int, Any]] | None = None
    _shares = False

    def charge(self, size: int) -> None:
        """Charges for bytes, or for steps as if they were bytes; raises TemplateError beyond a limit."""
        self._left -= size
        if self._left < 0:
            self._settle()

    def _settle(self) -> None:
        settings, now = get_settings(), monotonic()
        self._began = self._began or now
        self._used += self._granted - self._left
        if self._used > settings.template_bytes:
            raise _too_large()
        if now - self._began > settings.template_seconds:
            raise TemplateError(
                f"rendering takes more than {settings.template_seconds:g} seconds; compute this in a python step "
                "(limit: NOETL_TEMPLATE_SECONDS)"
            )
        self._left = self._granted = _SLICE

    def reserve(self, size: float) -> None:
        """Raises TemplateError if so many bytes would exceed the budget, before they are built."""
        if size > SMALL and size > get_settings().template_bytes - self._used:
            raise _too_large()

    def counted(self, items: Iterable[Any], cost: int) -> Iterable[Any]:
        """Charges for the items of a loop: at once if their number is known, which costs least."""
        if isinstance(items, Sized):
            self.charge(cost * len(items) + cost)
            return items if len(items) <= FEW else chain.from_iterable(self._timed(iter(items)))
        return self._counted(items, cost)

    def _timed(self, items: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
        """Looks at the clock while a long loop runs, whose body may search long texts."""
        while some := tuple(islice(items, 256)):
            self._settle()
            yield some

    def _counted(self, items: Iterable[Any], cost: int) -> Iterator[Any]:
        for item in items:
            self.charge(cost)
            yield item

    def text(self, value: Any) -> str:
        """Returns the text of a value that is put out in a loop, a macro or a block."""
        text = str(self.read(value))
        self.charge(len(text) + 8)
        return text

    def paid(self, value: Any) -> Any:
        """Charges for a result of a filter or call, and returns it."""
        kind = value.__class__
        if kind is str or kind is bytes:
            if len(value) > SMALL:
                self.charge(len(value))
        elif kind in CONTAINERS:
            if len(value) > FEW:
                self.charge(8 * len(value))
            if self._extents is not None:
                self.built(value)
        return value

    def track(self) -> None:
        """Counts what lists and mappings hold from now on: variables may make them share much."""
        self._extents = {}

    def share(self) -> None:
        """Counts from now on also what filters read: one filter may have put a value into many places."""
        if not self._shares:
            self._shares = True
            self.track()

    def read(self, value: Any) -> Any:
        """Returns a value that a filter reads; raises TemplateError if it holds too much."""
        return self.built(value) if self._shares and value.__class__ in CONTAINERS else value

    def built(self, value: Any) -> Any:
        """Returns a list or mapping; raises TemplateError if it holds too much, counting each part as often as held."""
        if self._extents is None:
            self._extents = {}
        size, levels = self._extent(value)
        if levels > _LEVELS:
            raise TemplateError(f"a value is nested deeper than {_LEVELS} levels; flatten it")
        self.reserve(size)
        return value

    def _extent(self, value: Any) -> tuple[int, int]:
        """Returns the size of a value without sharing, and its levels."""
        kind = value.__class__
        if kind not in CONTAINERS:
            return (len(value) + 8, 0) if kind is str or kind is bytes else (8, 0)
        assert self._extents is not None
        known = self._extents.get(id(value))
        if known is None:
            self.charge(8 * len(value))
            size, levels = 16, 0
            for item in (*value, *value.values()) if kind is dict else value:
                inner, below = self._extent(item)
                size, levels = size + inner, max(levels, below)
            # the value is kept, so that its id stays its own
            known = self._extents[id(value)] = size, levels + 1, value
        return known[:2]


def _too_large() -> TemplateError:
    limit = get_settings().template_bytes
    return TemplateError(
        f"rendering builds more than {limit:,} bytes; compute this in a python step (limit: NOETL_TEMPLATE_BYTES)"
    )


def length(value: Any) -> int:
    """Returns the length of a value, 0 if it has none."""
    try:
        return len(value)
    except (TypeError, UndefinedError):
        return 0


def plus(context: Budget, left: Any, right: Any) -> Any:
    """``+`` in templates that may repeat it."""
    result = left + right
    if result.__class__ is int:
        return result
    return context.paid(result)


def joined(context: Budget, parts: tuple[Any, ...]) -> str:
    """``~`` in templates that may repeat it."""
    texts = [str(part) for part in parts]
    context.charge(sum(map(len, texts)))
    return "".join(texts)


def times(context: Budget, left: Any, right: Any) -> Any:
    """``*`` of numbers and sequences."""
    left, right = unwrapped(left), unwrapped(right)
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length(), "*")
        return left * right
    many, count = (left, right) if isinstance(right, int) else (right, left)
    if isinstance(many, Sized) and isinstance(count, int):
        if isinstance(many, list | tuple):
            context.built(many)
            context.reserve(context._extent(many)[0] * count)
        context.reserve(len(many) * count)
        context.charge(max(0, len(many) * count))
    return left * right


def power(context: Budget, left: Any, right: Any) -> Any:
    """``**`` of numbers."""
    left, right = unwrapped(left), unwrapped(right)
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right, "**")
    return left**right


def _check_bits(bits: int, operator: str) -> None:
    if bits > _BITS:
        raise TemplateError(f"'{operator}' gives an integer of more than {_BITS:,} bits; compute with floats")


def remainder(context: Budget, left: Any, right: Any) -> Any:
    """``%`` of numbers, and the formatting of texts."""
    left = unwrapped(left)
    if isinstance(left, str | bytes):
        if len(left) <= SMALL and right.__class__ is int and isinstance(left, str) and not _WIDE.search(left):
            return left % right
        text = left if isinstance(left, str) else left.decode("latin-1")
        values = right.values() if isinstance(right, Mapping) else right if isinstance(right, tuple) else (right,)
        context.reserve(_formatted(text, text.count("%"), values))
        return context.paid(left % right)
    return left % right


def _formatted(text: str, fields: int, values: Any) -> float:
    """Estimates what a format gives: its widths, and the longest value in each field."""
    longest = widths = 0
    for value in map(unwrapped, values):
        if isinstance(value, int):
            widths += abs(value) if "*" in text or "{" in text else 0  # it may be the width of another field
        elif not isinstance(value, float):
            longest = max(longest, len(value) if isinstance(value, str) else len(str(value)))
    widths += sum(int("9" * min(len(width), 12)) for width in _WIDTHS.findall(text))
    return len(text) + fields * (widths + longest)


def _formatted_filter(text: Any, *values: Any, **named: Any) -> float:
    return _formatted(str(text), str(text).count("%"), (*values, *named.values()))


def check_format(context: Budget, text: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Reserves what ``text.format(...)`` can give."""
    nested = re.search(r"\{[^{}]*\{", text) is not None  # {:{width}}
    context.reserve(
        _formatted(text if nested else text.replace("{", "["), text.count("{"), (*arguments, *named.values()))
    )


def _number(value: Any) -> int:
    value = unwrapped(value)
    return abs(value) if isinstance(value, int) else 0


def _count(value: Any, *parts: str) -> int:
    """Counts occurrences in a text or in bytes."""
    if isinstance(value, bytes):
        return sum(value.count(part.encode()) for part in parts)
    return sum(map(str(value).count, parts))


def _width(value: Any, width: Any = 80, *rest: Any) -> float:
    return length(value) + _number(width)


def _replaced(value: Any, old: Any = "", new: Any = "", count: Any = None) -> float:
    found = _count(value, old.decode("latin-1") if isinstance(old, bytes) else str(old))
    return length(value) + (found if count is None else min(found, _number(count))) * length(new)


def _joined(value: Any, between: Any = "", attribute: Any = None) -> float:
    return length(value) * (length(between) + 1)


def _joined_method(between: Any, value: Any = ()) -> float:
    return _joined(value, between) + (sum(map(length, value)) if isinstance(value, list | tuple) else 0)


def _indented(value: Any, width: Any = 4, first: Any = False, blank: Any = False) -> float:
    step = len(width) if isinstance(width, str) else _number(width)
    return length(value) + (_count(value, "\n") + 1) * step


def _wrapped(value: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = None, *rest: Any) -> float:
    columns = max(1, _number(width))
    return max(length(value) * (32 + length(wrapstring) / columns), _longest_run(value) ** 2 / columns)


def _longest_run(value: Any) -> int:
    """Returns the length of the longest word or space, which some functions of Python read in quadratic time."""
    return max(map(len, _RUNS.findall(str(value))), default=0)


def shares(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Returns whether a filter of :data:`SHARING` gets a value that costs something in many places."""
    given = map(unwrapped, (*arguments[1:], *(named[name] for name in _SHARED if name in named)))
    return any(length(value) > (0 if value.__class__ in CONTAINERS else _SHORT) for value in given)


def _grouped(value: Any, attribute: Any, default: Any = None, case_sensitive: Any = False) -> float:
    size = length(default)  # it is copied for each item without the attribute
    return (length(value) or _MOST_GENERATED) * size if isinstance(default, str) and size > _SHORT else 0


def _linked(value: Any, *rest: Any) -> float:
    return max(_words(value), 16 * _longest_run(value) ** 2)


def _parsed(value: Any) -> float:
    return 64 * _count(value, "[", "{") + 8 * _count(value, ",")


def _batched(value: Any, linecount: Any = 1, fill_with: Any = None) -> float:
    return 8 * (length(value) + (_number(linecount) if fill_with is not None else 0))


def _sliced(value: Any, slices: Any = 1, fill_with: Any = None) -> float:
    return 8 * length(value) + 64 * _number(slices)


def _rounded(value: Any, precision: Any = 0, method: Any = "common") -> float:
    return float("inf") if _number(precision) > 1000 else 0


def _listed(value: Any, *rest: Any) -> float:
    return 8 * length(value)


def _words(value: Any, *rest: Any) -> float:
    return 32 * length(value)


def _split(value: Any, separator: Any = None, *rest: Any) -> float:
    return 64 * (_count(value, " ", "\n", "\t") if separator is None else _count(value, str(separator)))


def _lines(value: Any, *rest: Any) -> float:
    return 64 * _count(value, "\n")


def _tabs(value: Any, tabsize: Any = 8) -> float:
    return length(value) + _count(value, "\t") * _number(tabsize)


def _translated(value: Any, table: Any = (), *rest: Any) -> float:
    longest = max(map(length, table.values()), default=1) if isinstance(table, Mapping) else 1
    return length(value) * max(1, longest)


def _bytes(value: Any, count: Any = 1, *rest: Any) -> float:
    return _number(count)


def _truncated(value: Any, limit: Any = 255, killwords: Any = False, end: Any = "...", leeway: Any = None) -> float:
    return length(value) + length(end)


def _number_of(value: Any, default: Any = 0, base: Any = 10) -> float:
    # int(Decimal("1E+999999999"))
    adjusted = getattr(value, "adjusted", None)
    return float("inf") if adjusted is not None and adjusted() > _BITS else 0


FILTER_SIZES: dict[str, Callable[..., float]] = {
    "abs": _number_of,
    "batch": _batched,
    "center": _width,
    "format": _formatted_filter,
    "from_json": _parsed,
    "fromjson": _parsed,
    "groupby": _grouped,
    "indent": _indented,
    "int": _number_of,
    "join": _joined,
    "list": _listed,
    "replace": _replaced,
    "round": _rounded,
    "slice": _sliced,
    "sort": _listed,
    "striptags": _words,
    "title": _words,
    "truncate": _truncated,
    "urlize": _linked,
    "wordcount": _words,
    "wordwrap": _wrapped,
}
"""Estimates of what filters build, by the arguments that they take."""

METHOD_SIZES: dict[str, Callable[..., float]] = {
    "center": _width,
    "expandtabs": _tabs,
    "join": _joined_method,
    "ljust": _width,
    "replace": _replaced,
    "rjust": _width,
    "rsplit": _split,
    "split": _split,
    "splitlines": _lines,
    "to_bytes": _bytes,
    "translate": _translated,
    "zfill": _width,
}
"""Estimates of what methods of texts, bytes, numbers and mappings build."""


def check_method(
    context: Budget, function: BuiltinMethodType, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    """Reserves what a method of :data:`METHOD_SIZES` builds."""
    check(context, METHOD_SIZES[function.__name__], (function.__self__, *map(unwrapped, arguments)), named)


def check(context: Budget, estimate: Callable[..., float], arguments: Any, named: Mapping[str, Any]) -> None:
    """Reserves what an estimate gives for these arguments."""
    try:
        size = estimate(*arguments, **named)
    except (TypeError, AttributeError, ValueError):
        return  # the call refuses these arguments itself
    if size > SMALL:
        context.reserve(size)
