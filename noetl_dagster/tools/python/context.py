"""The execution as code sees it: names of the scope as plain values, and ``context``.

Imports little, so that the subprocess of ``isolation: subprocess`` starts fast.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from noetl_dagster.playbook.templates.views import ReferenceNeeded, ResultView, plain, seen_error
from noetl_dagster.values import RefusedValueError, admit

if TYPE_CHECKING:
    from noetl_dagster.tools.base import ToolContext

T = TypeVar("T")

_READ_BY_VIEW = frozenset({"data", "ref", "extracted", "results", "error"})


class LiveScope(Mapping[str, Any]):
    """The names of a scope for code in a thread: plain values; references are fetched on access."""

    def __init__(self, scope: Mapping[str, Any], context: ToolContext, loop: asyncio.AbstractEventLoop) -> None:
        self._scope = scope
        self._tool_context = context
        self._loop = loop

    def __getitem__(self, name: str) -> Any:
        return self.fetched(lambda: plain(self._scope[name]))

    def __contains__(self, name: object) -> bool:
        return name in self._scope

    def __iter__(self) -> Iterator[str]:
        return iter(self._scope)

    def __len__(self) -> int:
        return len(self._scope)

    def context(self) -> CodeContext:
        """Returns the ``context`` of the code."""
        return CodeContext(self._scope, self._tool_context, self._loop)

    def fetched(self, attempt: Callable[[], T]) -> T:
        """Calls ``attempt``, from a thread, and fetches the stored results that it needs."""
        while True:
            try:
                return attempt()
            except ReferenceNeeded as needed:
                fetch = asyncio.run_coroutine_threadsafe(self._tool_context.results.get(needed.reference), self._loop)
                needed.cache[needed.reference.ref] = fetch.result()

    def values_of(self, wanted: Set[str]) -> dict[str, Any]:
        """Returns the wanted names, fetched, for another process."""
        return {name: self[name] for name in wanted if name in self}


class CodeContext(LiveScope):
    """The read-only ``context`` of code: the names of templates; results of steps contain their ``data``."""

    def __getitem__(self, name: str) -> Any:
        return self.fetched(lambda: _whole(self._scope[name]))

    def portable(self) -> dict[str, Any]:
        """Returns everything, fetched, for another process: ``values``, and ``results``, the names of results.

        The keychain and values without a JSON form, such as tables, are left out.
        """
        values = {}
        for name in (name for name in self if name != "keychain"):
            value = self[name]
            with suppress(RefusedValueError):
                admit(value)
                values[name] = value
        results = [name for name, value in values.items() if isinstance(value, CodeResult)]
        return {"values": values, "results": results}

    @staticmethod
    def ported(context: Mapping[str, Any]) -> Mapping[str, Any]:
        """Restores the value of ``portable`` in the other process."""
        values = dict(context["values"])
        values.update({name: CodeResult.of(values[name]) for name in context["results"]})
        return MappingProxyType(values)


class CodeResult(dict[str, Any]):
    """A result of a step or task: ``status``, ``data``, ``error``, ...

    A missing key is looked up in its ``data``, then in the ``data`` inside that, as templates do.
    """

    @classmethod
    def of(cls, envelope: Mapping[str, Any]) -> CodeResult:
        """Returns the result of an envelope."""
        result = cls(envelope)
        data = envelope.get("data")
        if isinstance(data, dict) and isinstance(data.get("data"), dict):
            result["data"] = cls(data)
        return result

    def __missing__(self, key: str) -> Any:
        inner = dict.get(self, "data")
        for _ in range(2):
            if isinstance(inner, dict):
                if dict.__contains__(inner, key):
                    return dict.__getitem__(inner, key)
                inner = dict.get(inner, "data")
        raise KeyError(key)

    # those of dict do not look keys up as above
    __contains__ = Mapping.__contains__  # type: ignore[assignment]
    get = Mapping.get  # type: ignore[assignment]


def _whole(value: Any) -> Any:
    if isinstance(value, ResultView):
        return _result(value)
    if isinstance(value, dict) and any(isinstance(item, ResultView) for item in value.values()):
        return {name: _whole(item) for name, item in value.items()}
    return plain(value)


def _result(view: ResultView) -> Any:
    """Returns the envelope with its data fetched; for a loop the value that templates get."""
    if view.is_loop:
        return plain(view)
    parts = {key: plain(item) for key, item in view.envelope.items() if key not in _READ_BY_VIEW}
    parts["error"] = seen_error(view.envelope.get("error"))
    if isinstance(view.envelope.get("results"), Mapping):
        parts["results"] = {name: _whole(item) for name, item in view.results.items()}
    if "data" in view.envelope or view.stored is not None:
        parts["data"] = plain(view.plain())
    return CodeResult.of(parts)
