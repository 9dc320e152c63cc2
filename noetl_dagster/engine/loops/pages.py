"""Collected pages of a sequence of attempts: in memory while they are small, else stored part by part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noetl_dagster.errors import StorageError, ToolError
from noetl_dagster.events.envelopes import OK, Envelope
from noetl_dagster.playbook.models import Collect, CollectStrategy
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.storage import codec
from noetl_dagster.storage.manifests import Strategy
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.worker.command import Command

PART_BYTES = 1 << 20
"""Bytes of JSON of collected pages, from which on they are stored as one part."""

MISSING = object()


class Pages:
    """Collects pages by their strategy.

    Appended pages may have any size. A merged mapping, and a page that replaces the one before, stay in memory, since
    their readers hold them in memory too.

    Attributes:
        count: pages collected.
        failure: the reason why pages are missing.
    """

    def __init__(self, store: ResultStore) -> None:
        self._store = store
        self._value: Any = None
        self._bytes = 0
        self._parts: list[ResultRef] = []
        self._strategy: CollectStrategy | None = None
        self.count = 0
        self.failure: ToolError | StorageError | None = None

    @property
    def is_used(self) -> bool:
        """Reports that a page was added, or could not be."""
        return self._strategy is not None or self.failure is not None

    def fail(self, error: ToolError) -> None:
        """Records an error that makes the pages no result; the first error counts."""
        self.failure = self.failure or error

    async def add(self, collect: Collect, body: Any, command: Command, *, alone: bool) -> ResultRef | None:
        """Adds the value at the path of a page.

        Args:
            command: the page's, by which its part is named.
            alone: makes it a part of its own.

        Returns:
            The part of a page that is a part of its own.
        """
        self._strategy = collect.strategy
        self.count += 1
        try:
            part = _part(body, collect.path)
            if part is MISSING:
                message = f"collect: page {self.count} has no {collect.path!r}"
                raise ToolError(f"{message}; name the path of what a page brings", kind="schema")
            if collect.strategy is CollectStrategy.REPLACE:
                self._value = part
            elif collect.strategy is CollectStrategy.MERGE:
                self._value = {} if self._value is None else self._value
                self._value.update(part if isinstance(part, Mapping) else {})
            else:
                rows = _rows(part)
                self._value = [] if self._value is None else self._value
                self._value.extend(rows)
                self._bytes += len(codec.dump_json(rows))
                if self._bytes > PART_BYTES or alone:
                    return await self._flush(command)
            if alone:
                return await self._stored(part, command)
        except (ToolError, StorageError) as error:
            self.failure = error
        return None

    async def envelope(self, command: Command) -> Envelope:
        """Returns all pages as one result.

        Args:
            command: the last one.

        Raises:
            ToolError, StorageError: pages could not be collected or stored.
        """
        if self.failure is not None:
            raise self.failure
        if not self._parts:
            return {"status": OK, "data": self._value}
        if self._value:
            await self._flush(command)
        name = _name(command)
        ref = await self._store.manifest(
            command.execution_id, command.step, name, self._parts, Strategy.CONCAT
        )
        return {"status": OK, "ref": ref}

    async def _flush(self, command: Command) -> ResultRef:
        rows, self._value, self._bytes = self._value, [], 0
        self._parts.append(await self._stored(rows, command))
        return self._parts[-1]

    async def _stored(self, value: Any, command: Command) -> ResultRef:
        return await self._store.put(
            value,
            execution_id=command.execution_id,
            step=command.step,
            name=f"{_name(command)}-{command.attempt}",
        )


def _name(command: Command) -> str:
    return f"pages-{command.visit}" + ("" if command.index is None else f"-{command.index}")


def _rows(part: Any) -> list[Any]:
    if (table := codec.as_arrow_table(part)) is not None:
        part = table.to_pylist()
    return part if isinstance(part, list) else [part]


def _part(body: Any, path: str | None) -> Any:
    """Returns the value at a path of the body or of its ``data``; ``MISSING`` if neither has it."""
    value = body
    for key in path.split(".") if path else ():
        value = value.get(key, MISSING) if isinstance(value, Mapping) else MISSING
    if value is MISSING and isinstance(body, Mapping) and isinstance(body.get("data"), Mapping):
        return _part(body["data"], path)
    return value
