"""Shows results to templates and Python code: one tolerant view over every shape of envelope.

An envelope is a plain mapping with the keys ``status``, ``data`` (absent while only a reference is
known), ``ref``, ``extracted``, ``error``, ``meta``, ``http`` / ``pg`` / ``py`` / ``playbook``, and
``results``: for a step with several tasks a mapping of task name to envelope, for a loop the list of its
items' envelopes.
A loop's envelope also has ``total``, ``done`` and ``failed``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from types import GeneratorType
from typing import Any

from noetl_dagster.result_ref import ResultRef, RowsAround
from noetl_dagster.values import converted

LAZY_SEQUENCES = (GeneratorType, KeysView, ValuesView, ItemsView, range, map, filter, zip, set, frozenset)
"""Types of what a template may give that can be read only once, or is not JSON."""

_ENVELOPE_KEYS = frozenset(
    {"status", "data", "ref", "extracted", "error", "meta", "http", "pg", "py", "playbook", "results"}
)
NOTHING = object()
"""Marks a name that was not found."""

LEAVES = frozenset({str, int, float, bool, type(None)})
"""Exact types of JSON that contain no other values."""


class ReferenceNeeded(Exception):
    """A view was touched whose data is elsewhere: fetch ``reference``, put its value into ``cache``."""

    def __init__(self, reference: ResultRef, cache: ReferenceCache) -> None:
        super().__init__(f"result {reference.ref} has to be fetched first")
        self.reference = reference
        self.cache = cache


class ReferenceCache(dict[str, Any]):
    """Values fetched so far, by the logical name of their reference. One per task: dropped when it ends."""

    def load(self, reference: ResultRef) -> Any:
        """Returns the value of a reference, or raises ReferenceNeeded if it has not been fetched yet."""
        value = self.get(reference.ref, NOTHING)
        if value is NOTHING and reference.around is not None:
            value = self[reference.ref] = _around(reference, reference.around, self)
        if value is NOTHING:
            raise ReferenceNeeded(reference, self)
        return value


def _of_value(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: operation(self._value())


def _compared(operation: Callable[[Any, Any], Any]) -> Callable[..., bool]:
    return lambda self, other: bool(operation(self._value(), unwrapped(other)))


def _both_ways(operation: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns an operator of the values behind views, with the view on its left and on its right."""
    return (
        lambda self, other: operation(self._value(), unwrapped(other)),
        lambda self, other: operation(other, self._value()),
    )


class View:
    """Behaves like the value behind it, which may still have to be fetched.

    Subclasses say what the value is (:meth:`plain`), what stands behind operators (:meth:`_value`)
    and how a key is found (:meth:`_find`).
    """

    __slots__ = ()

    def plain(self) -> Any:
        """Returns the value without views, as tools and JSON take it."""
        return self._value()

    def _value(self) -> Any:
        raise NotImplementedError

    def _find(self, key: Any) -> Any:
        raise NotImplementedError

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            value = self._find(key)
            if value is not NOTHING:
                return value
            raise KeyError(key)
        return self._value()[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = self._find(name)
        if value is NOTHING:
            raise AttributeError(name)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key, or the default."""
        value = self._find(key)
        return default if value is NOTHING else value

    def keys(self) -> list[Any]:
        """Returns the keys of the value."""
        return list(self._value().keys())

    def values(self) -> list[Any]:
        """Returns the values of the value's keys."""
        return list(self._value().values())

    def items(self) -> list[tuple[Any, Any]]:
        """Returns the pairs of keys and values."""
        return list(self._value().items())

    def __contains__(self, key: Any) -> bool:
        value = self._value()
        if isinstance(value, Mapping) and isinstance(key, str):
            return self._find(key) is not NOTHING
        return key in value

    __iter__, __len__, __bool__ = _of_value(iter), _of_value(len), _of_value(bool)
    __hash__, __int__, __float__ = _of_value(hash), _of_value(int), _of_value(float)
    __index__, __neg__, __pos__ = _of_value(operator.index), _of_value(operator.neg), _of_value(operator.pos)

    __eq__, __lt__, __le__ = _compared(operator.eq), _compared(operator.lt), _compared(operator.le)
    __gt__, __ge__ = _compared(operator.gt), _compared(operator.ge)
    __add__, __radd__ = _both_ways(operator.add)
    __sub__, __rsub__ = _both_ways(operator.sub)
    __mul__, __rmul__ = _both_ways(operator.mul)
    __truediv__, __rtruediv__ = _both_ways(operator.truediv)
    __floordiv__, __rfloordiv__ = _both_ways(operator.floordiv)
    __mod__, __rmod__ = _both_ways(operator.mod)
    __pow__, __rpow__ = _both_ways(operator.pow)

    def __str__(self) -> str:
        return str(self.plain())


class LazyMapping(Mapping[str, Any]):
    """A mapping whose values may still have to be fetched; templates give it on with all of them there."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        return self._fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return repr(plain(self))


def _opened(fields: Mapping[str, Any]) -> LazyMapping:
    """Returns a mapping with views in place of what is stored."""
    return LazyMapping({key: _opened(one) if type(one) is dict else one for key, one in fields.items()})


def _around(reference: ResultRef, around: RowsAround, cache: ReferenceCache) -> Mapping[str, Any]:
    """Returns a mapping around many rows, which are fetched when they are needed."""
    rows = DataView(None, reference=reference.rows_alone, cache=cache)
    stored = {name: DataView(None, reference=one, cache=cache) for name, one in around.stored.items()}
    return _opened(around.mapping(rows, stored))


converted.register(View, lambda view: view.plain())


class DataView(View):
    """The ``data`` of a result: a key of it, else the same key inside its own ``data``.

    Fields that ``output_select`` copied beside a reference are served without fetching it, mappings that hold
    such fields as views of their own: ``path`` leads to this one.
    """

    __slots__ = ("_cache", "_data", "_extracted", "_path", "_reference")

    def __init__(
        self,
        data: Any,
        *,
        reference: ResultRef | None = None,
        extracted: Mapping[str, Any] | None = None,
        cache: ReferenceCache | None = None,
        path: tuple[str, ...] = (),
    ) -> None:
        self._data = data
        self._path = path
        self._reference = reference
        self._extracted = extracted or {}
        self._cache = cache

    @property
    def stored(self) -> ResultRef | None:
        """The reference behind which the whole value is stored, None when it stands here or is a part."""
        return None if self._path else self._reference

    @property
    def is_rows(self) -> bool:
        """Reports whether it is the rows of a stored result, which may not fit into memory."""
        return self._reference is not None and self._reference.is_rows

    def __len__(self) -> int:
        if self._reference is not None and self.is_rows:
            return self._reference.rows or 0
        return len(self._value())

    def __bool__(self) -> bool:
        return len(self) > 0 if self.is_rows else bool(self._value())

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and key >= 0 and self._reference is not None and self.is_rows:
            assert self._cache is not None
            beginning = self._cache.load(self._reference.first_part)
            if key < len(beginning):
                return beginning[key]
        return super().__getitem__(key)

    def _value(self) -> Any:
        if self._reference is None or self._cache is None:
            return self._data
        value = self._cache.load(self._reference)
        for key in self._path:
            value = find_in_data(value, key)
        return value

    def selected(self, key: str) -> Any:
        """Returns a field that is stored beside the reference, a view of those below ``key``, or NOTHING."""
        field = _extracted_field(self._extracted, key, inside=bool(self._path))
        below = _extracted_below(self._extracted, key) if field is NOTHING and self._reference else None
        if not below:
            return field
        path = (*self._path, key)
        return DataView(None, reference=self._reference, extracted=below, cache=self._cache, path=path)

    def _find(self, key: str) -> Any:
        if key == "_ref" and self.stored is not None:
            return self.stored.model_dump(mode="json")
        value = self.selected(key) if self._extracted else NOTHING
        return find_in_data(self._value(), key) if value is NOTHING else value

    def __repr__(self) -> str:
        return f"DataView({self._reference.ref if self._reference else self._data!r})"


class ResultView(View):
    """The result of a step or task.

    ``view.x`` and ``view["x"]`` look for ``x`` in the envelope itself, then among the fields extracted
    beside its reference, then in its ``data``, then in ``data.data``; ``result`` is an older name of data,
    and ``response`` is the body of an http answer.
    ``_ref`` is the reference where the data is stored, and undefined where it stands in the envelope.
    Everything else (iteration, length, truth, comparison, text) is that of the data.
    """

    __slots__ = ("_cache", "envelope")

    def __init__(self, envelope: Mapping[str, Any], cache: ReferenceCache) -> None:
        self.envelope = envelope
        self._cache = cache

    @property
    def is_loop(self) -> bool:
        """Reports whether the result is a loop's."""
        return "total" in self.envelope

    @property
    def stored(self) -> ResultRef | None:
        """The reference behind which the data is stored, None when it stands in the envelope."""
        if "data" in self.envelope:
            return None
        reference = self.envelope.get("ref")
        return ResultRef.model_validate(reference) if reference is not None else None

    def _value(self) -> Any:
        if "data" in self.envelope:
            return self.envelope["data"]
        reference = self.stored
        if reference is not None:
            return self._cache.load(reference)
        if self.is_loop:
            return self._items()
        return self.envelope.get("error")

    def _items(self) -> list[Any]:
        results = self.envelope.get("results")
        items = results if isinstance(results, list) else self._value()
        return [ResultView(item, self._cache) if is_envelope(item) else item for item in items]

    def _find(self, key: str) -> Any:
        if key == "data":
            return self._data()
        if key == "results" and self.is_loop:
            return self._items()
        if key == "results" and "results" in self.envelope:
            return {name: ResultView(result, self._cache) for name, result in self.envelope[key].items()}
        if key == "stats" and self.is_loop:
            return loop_stats(self.envelope)
        value = self.envelope.get(key)
        if value is not None:
            return seen_error(value) if key == "error" else value
        if key == "_ref":
            reference = self.stored
            return NOTHING if reference is None else reference.model_dump(mode="json")
        data = self._data() if self.envelope.get("extracted") else None
        inner = data.selected(key) if isinstance(data, DataView) else NOTHING
        if inner is NOTHING:
            inner = find_in_data(self._value(), key)
        if inner is not NOTHING:
            return inner
        if key == "result":
            return self._data()
        if key == "response":  # the body of an http result, the data of any other
            data = self._data()
            is_answer = "http" in self.envelope and isinstance(data, DataView) and "status_code" in data
            body = data["data"] if is_answer else data
            return DataView(body) if isinstance(body, Mapping) else body
        return None if key in _ENVELOPE_KEYS and key in self.envelope else NOTHING

    def _data(self) -> Any:
        reference, extracted = self.stored, self.envelope.get("extracted")
        if reference is not None:
            return DataView(None, reference=reference, extracted=extracted, cache=self._cache)
        value = self._value() if "data" in self.envelope or self.is_loop else None
        return DataView(value, extracted=extracted) if isinstance(value, Mapping) else value

    def plain(self) -> Any:
        """Returns the data; of a loop its results, data, counts and stats; of a failure its envelope."""
        if self.is_loop:
            results = plain(self._items())
            counts = {key: self.envelope.get(key) for key in ("status", "total", "done", "failed")}
            return {"results": results, "data": results, **counts, "stats": loop_stats(self.envelope)}
        if "data" in self.envelope or self.envelope.get("ref") is not None:
            return self._value()
        return dict(self.envelope)

    def __repr__(self) -> str:
        return f"ResultView(status={self.envelope.get('status')!r})"


class SeenKind(str):
    """``error.kind``, which also equals the name of the tool that failed: some playbooks test that.

    To JSON and to everything but a comparison it is the kind alone.
    """

    source: str

    def __new__(cls, kind: str, source: str = "") -> SeenKind:
        """Creates the text of the kind, with its source."""
        seen = super().__new__(cls, kind)
        seen.source = source
        return seen

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or (isinstance(other, str) and other == self.source)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def seen_error(error: Any) -> Any:
    """Returns the ``error`` part of an envelope for templates; an error without ``source`` as it is."""
    if isinstance(error, Mapping) and error.get("source"):
        return {**error, "kind": SeenKind(str(error.get("kind")), str(error["source"]))}
    return error


def loop_stats(envelope: Mapping[str, Any]) -> dict[str, int]:
    """Returns the numbers of a loop's items; skipped are those that never ran, since the loop stopped before."""
    total, succeeded, failed = (envelope.get(name) or 0 for name in ("total", "done", "failed"))
    return {"total": total, "succeeded": succeeded, "failed": failed, "skipped": total - succeeded - failed}


def _extracted_field(extracted: Mapping[str, Any], key: str, *, inside: bool = False) -> Any:
    """Returns the field of this path, else the one whose path ends so: ``total`` of ``data.paging.total``; or NOTHING.

    Inside of a mapping of the result only paths count.
    """
    if key in extracted:
        return extracted[key]
    if inside:
        return NOTHING
    ending = f".{key}"
    return next((value for path, value in extracted.items() if path.endswith(ending)), NOTHING)


def _extracted_below(extracted: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the fields below a mapping: of ``paging.total`` below ``paging`` it is ``total``."""
    return {
        path.removeprefix(prefix): value
        for prefix in (f"data.{key}.", f"{key}.")
        for path, value in extracted.items()
        if path.startswith(prefix)
    }


def unwrapped(value: Any) -> Any:
    """Returns the value behind a view, or raises ReferenceNeeded; any other value as it is, including views in it."""
    return value._value() if isinstance(value, View) else value


def find_in_data(data: Any, key: str) -> Any:
    """Returns ``data[key]``, else ``data["data"][key]``, else a marker that is no value."""
    if data.__class__ is dict or isinstance(data, (View, Mapping)):
        if key in data:
            return data[key]
        inner = data.get("data")
        if isinstance(inner, Mapping) and key in inner:
            return inner[key]
    return NOTHING


def is_envelope(value: Any) -> bool:
    """Reports whether a mapping has the shape of a task's envelope."""
    return (
        isinstance(value, Mapping)
        and value.get("status") in ("ok", "error")
        and _ENVELOPE_KEYS.issuperset(value)
        and ("data" in value or "ref" in value or "error" in value)
    )


def plain(value: Any) -> Any:
    """Copies ``value`` without views, tuples or lazy sequences: as JSON allows, and code may change it.

    Raises:
        ReferenceNeeded: when a view inside has not been fetched yet.
    """
    kind = type(value)
    if kind in LEAVES:  # the exact types of JSON first: this runs over every value of large results
        return value
    if kind is dict:
        return {key: item if type(item) in LEAVES else plain(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in LEAVES else plain(item) for item in value]
    if isinstance(value, View):
        return plain(value.plain())
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, *LAZY_SEQUENCES)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, str) else value
