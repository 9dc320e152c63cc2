"""Parts of sinks: staged, published when their iterations are complete, or discarded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from noetl_dagster.errors import CredentialError, ToolError, kind_of
from noetl_dagster.playbook.models import Sink
from noetl_dagster.playbook.templates.rendering import compile_value, render_async
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.files import check_path
from noetl_dagster.tools.rows.batches import has_rows
from noetl_dagster.tools.sinks.place import PartPlace, PartTarget, SinkKind, place_of


class PartSinks:
    """Writes parts with the credentials of a tool context."""

    def __init__(self, context: ToolContext) -> None:
        self._tool_context = context

    async def stage(
        self,
        sink: Sink,
        value: Any,
        scope: Mapping[str, Any],
        *,
        name: str,
        own: Mapping[str, Any],
        folder: str,
    ) -> PartPlace | None:
        """Renders a sink's fields and stages the rows of one result; None if it has none.

        Args:
            value: the result; see :func:`batches_of`.
            name: of the part; the same for every try of the command that made the result.
            own: columns that name the iteration; filled in if the table has them.

        Raises:
            ToolError: it could not be written.
        """
        texts = ("table", "path", "database", "auth", "args", "mode", "format", "on_new_column")
        fields = {field: getattr(sink, field) for field in texts}
        rendered = await render_async(compile_value(fields), scope, self._tool_context.results.get)
        ready = sink.model_copy(update=rendered)
        for field, key in (("path", sink.tool not in ("file", "duckdb", "sqlite")), ("database", False)):
            where = f"sink to {sink.tool}, {field}"
            check_path(rendered[field], fields[field], folder, self._tool_context.settings, where, key=key)
        place = place_of(ready, name, dict(own), folder)
        result = ready.args or value
        if not await has_rows(result):
            return None
        with _errors(place):
            await self._parts(place).stage(place, result)
        return place

    async def publish(self, places: Iterable[PartPlace]) -> None:
        """Publishes parts of complete iterations; raises ``ToolError`` if one fails, which stays staged."""
        for target, parts in _by_target(places):
            with _errors(target):
                await self._parts(target).publish(target, parts)

    async def publish_staged(self, places: Iterable[PartPlace], prefix: str, *, is_over: bool = True) -> None:
        """Publishes the parts that are still staged, in the given order.

        Args:
            places: of all parts of complete iterations.
            prefix: of the names of all parts.
            is_over: no command stages parts any more; those of the prefix without a completion are discarded.

        Raises:
            ToolError: the store is unavailable, or a part is missing.
        """
        places = list(places)
        recorded = {place.part for place in places}
        for target, complete in _by_target(places):
            with _errors(target):
                parts = self._parts(target)
                staged = await parts.staged(target, prefix)
                if late := [place for place in complete if place.part in staged]:
                    await parts.publish(target, late)
                if is_over and (left := staged - recorded):
                    await parts.discard(target, left)
                others = [place for place in complete if place.part not in staged]
                missing = await parts.missing(target, others)
            if missing:
                raise ToolError(
                    f"sink: {len(missing)} parts of complete iterations, the first {missing[0]} (execution, step, "
                    "visit, iteration), are neither staged nor published in "
                    f"{target.kind} {target.table or target.path} as this process sees {target.path}: they were "
                    "removed, or written on another machine; resume where they are, on storage that all processes "
                    "share, or write to a bucket or to postgres",
                    kind="storage",
                )

    def _parts(self, place: PartPlace) -> PartTarget:
        if place.kind is SinkKind.DUCKDB:
            from noetl_dagster.tools.sinks.duckdb import DuckdbParts

            return DuckdbParts()
        if place.is_table:
            from noetl_dagster.tools.sinks.databases import DatabaseParts

            return DatabaseParts(self._tool_context)
        from noetl_dagster.tools.sinks.objects import ObjectParts

        return ObjectParts(self._tool_context)


def _by_target(places: Iterable[PartPlace]) -> list[tuple[PartPlace, list[PartPlace]]]:
    """Groups parts by the table or folder that they go to, in their order."""
    groups: dict[str, tuple[PartPlace, list[PartPlace]]] = {}
    for place in places:
        target = place.target
        groups.setdefault(target.model_dump_json(), (target, []))[1].append(place)
    return list(groups.values())


@contextmanager
def _errors(place: PartPlace) -> Iterator[None]:
    """Turns the errors of stores and file systems into ``ToolError``."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        text = f"sink: {place.kind} {place.path}: {type(error).__name__}: {error}"
        kind = kind_of(error)
        raise ToolError(text, kind="storage" if kind == "unknown" else kind, retryable=True) from None
    except CredentialError as error:
        raise ToolError(f"sink: {error}", kind=error.kind, retryable=error.retryable) from None
