"""The collection of a loop: evaluated once, stored in the log or by reference, read back on resumption."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import orjson

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ToolError
from noetl_dagster.playbook.templates.rendering import render_async, with_references
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.playbook.templates.views import DataView, ResultView
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.storage.manifests import Strategy, in_runs, strategy_of
from noetl_dagster.storage.store import NewResult, ResultStore
from noetl_dagster.values import admit, encode_json
from noetl_dagster.worker.execution import Visit
from noetl_dagster.worker.program import StepProgram

PART_ITEMS = 2_000
"""Items of one stored part of a collection, at most."""

PART_BYTES = 4 * 1024**2
"""JSON bytes of one stored part, about."""

PARTS_AT_ONCE = 8

SAMPLE = 50
"""Items whose average size determines the number of items in a part."""


class Collection:
    """The items of a loop, in memory; their ``length`` is None if the loop does not know it beforehand."""

    def __init__(self, items: Sequence[Any] = (), length: int | None = None) -> None:
        self._items = items
        self.length = length

    def __len__(self) -> int:
        return self.length or 0

    async def slice(self, start: int, stop: int) -> Sequence[Any]:
        """Returns the items of ``start <= index < stop``."""
        return self._items[start:stop]


class StoredCollection(Collection):
    """Items in stored parts of ``part_items`` items, listed in a manifest; the latest part is cached."""

    def __init__(self, store: ResultStore, reference: ResultRef, length: int, part_items: int) -> None:
        super().__init__(length=length)
        self._store = store
        self._reference = reference
        self._part_items = part_items
        self._held: tuple[int, Sequence[Any]] = (-1, ())

    async def slice(self, start: int, stop: int) -> Sequence[Any]:
        """Returns items; reads only the parts that hold them."""
        selected: list[Any] = []
        stop = min(stop, len(self))
        while start < stop:
            number, place = divmod(start, self._part_items)
            held, items = self._held
            if held != number:
                async for part in self._store.parts(self._reference, number, number + 1):
                    items = await self._store.get(part)
                self._held = number, items
            selected.extend(items[place : place + stop - start])
            start += len(items) - place
        return selected


class Partitions(Collection):
    """A collection in ranges of ``items_each`` items, each an item ``{start, stop}`` itself."""

    def __init__(self, collection: Collection, items_each: int) -> None:
        super().__init__(length=-(-len(collection) // items_each))
        self.collection = collection
        self._items_each = items_each

    async def slice(self, start: int, stop: int) -> Sequence[Any]:
        """Returns the partitions ``start <= number < stop``."""
        each, last = self._items_each, len(self.collection)
        return [
            {"start": place * each, "stop": min((place + 1) * each, last)}
            for place in range(start, min(stop, len(self)))
        ]


async def evaluate_collection(runtime: Runtime, program: StepProgram, scope: Scope) -> list[Any] | ResultRef:
    """Returns the items of a loop, in order, or a reference to many items that are stored already.

    Raises:
        ToolError: the value of ``in`` cannot be iterated over, or an item has no stored form.
        TemplateError: ``in`` cannot be rendered.
    """
    wanted, results = program.collection, runtime.results
    assert wanted is not None
    if wanted.is_expression and not wanted.is_fresh:  # a path, which may refer to a stored result
        value = await with_references(results.get, wanted.evaluate, scope)
        stored = _stored_list(value)
        if stored is not None:
            if (stored.rows or 0) > runtime.settings.loop_collection_threshold:
                return stored
            return [item async for item in results.items(stored)]
    items = _as_items(await render_async(wanted, scope, results.get), program.step.name)
    return list(admit(items, f"step {program.step.name}: loop.in"))


def _stored_list(value: Any) -> ResultRef | None:
    """Returns the reference of a stored list or table of known length. A mapping around rows is not one."""
    if not isinstance(value, (ResultView, DataView)) or value.stored is None or value.stored.rows is None:
        return None
    if isinstance(value, ResultView) and value.is_loop:
        return None  # its results are more than the items of its parts
    joined = strategy_of(value.stored) in (Strategy.APPEND, Strategy.CONCAT)
    return value.stored if value.stored.kind is not RefKind.MANIFEST or joined else None


def _as_items(collection: Any, step: str) -> list[Any]:
    """Returns a list as it is, a mapping as ``{key, value}`` pairs, and parses the JSON text of either."""
    value = collection
    if isinstance(collection, (str, bytes)):
        try:
            value = orjson.loads(collection)
        except orjson.JSONDecodeError:
            value = None
        value = value if isinstance(value, (list, dict)) else None
    if isinstance(value, Mapping):
        if isinstance(value.get("results"), list) and "total" in value:  # the result of another loop
            return list(value["results"])
        return [{"key": key, "value": item} for key, item in value.items()]
    if isinstance(value, Iterable):
        return list(value)
    raise ToolError(
        f"step {step}: loop.in gave {type(collection).__name__} {SECRETS.redact(str(collection))[:80]!r}, which is not "
        "a list; give a list, a mapping, or the JSON text of one",
        kind="loop",
    )


async def keep_collection(
    runtime: Runtime, visit: Visit, items: list[Any] | ResultRef, loop_id: str, partitions: int | None = None
) -> dict[str, Any]:
    """Stores a collection; returns the context of ``loop.started``, which :func:`kept_collection` reads.

    It is in the event while its items are few and small, else in parts, with a list of them for external readers.

    Args:
        items: from :func:`evaluate_collection`. Stored items pass through memory a few parts at a time.
        partitions: makes it :class:`Partitions`, at least this many if there are enough items.
    """
    settings, results = runtime.settings, runtime.results
    size = items.rows or 0 if isinstance(items, ResultRef) else len(items)
    part_items = items_a_part(await _sample(runtime, items))
    shape: dict[str, Any] = {}
    if partitions is not None:
        part_items = shape["partition_items"] = max(1, min(part_items, -(-size // partitions)))
    few = isinstance(items, list) and size <= settings.loop_collection_threshold
    if few and len(encode_json(items)) <= settings.inline_result_bytes:
        return {"collection": items, **shape}
    execution_id, step, name = visit.execution.id, visit.step, f"collection-{loop_id}"
    uris: list[str] = []

    async def parts() -> AsyncIterator[ResultRef]:
        start = 0
        async for batch in in_runs(_cut(runtime, items, part_items), PARTS_AT_ONCE):
            new = []
            for part in batch:
                new.append(NewResult(part, execution_id, step, f"{name}-{start}"))
                start += len(part)
            for reference in await results.put_many(new):
                uris.append(reference.physical_uri)
                yield reference

    reference = await results.manifest(execution_id, step, name, parts(), Strategy.CONCAT)
    index = await results.put(
        {"collection_size": size, "part_items": part_items, "parts": uris},
        execution_id=execution_id,
        step=step,
        name=f"{name}-index",
        parent_ref_id=reference.ref_id,
    )
    return {
        "collection_ref": index.physical_uri,
        "collection_reference": reference.model_dump(mode="json", exclude_defaults=True),
        "collection_size": size,
        "part_items": part_items,
        **shape,
    }


def kept_collection(runtime: Runtime, context: dict[str, Any]) -> Collection:
    """Returns the collection that :func:`keep_collection` stored; its parts are read when they are needed."""
    if "collection" in context:
        collection = Collection(context["collection"], len(context["collection"]))
    else:
        reference = ResultRef.model_validate(context["collection_reference"])
        size, part_items = context["collection_size"], context["part_items"]
        collection = StoredCollection(runtime.results, reference, size, part_items)
    items_each = context.get("partition_items")
    return collection if items_each is None else Partitions(collection, items_each)


def items_a_part(sample: Sequence[Any]) -> int:
    """Returns how many items a part of a stored collection has: one, or as many as fit into ``PART_BYTES``."""
    average = max(1, len(encode_json(sample)) // max(1, len(sample)))
    return max(1, min(PART_ITEMS, PART_BYTES // average))


async def _sample(runtime: Runtime, items: list[Any] | ResultRef) -> list[Any]:
    if isinstance(items, list):
        return items[:: max(1, len(items) // SAMPLE)]
    async for first in in_runs(runtime.results.items(items), SAMPLE):
        return first
    return []


async def _cut(runtime: Runtime, items: list[Any] | ResultRef, length: int) -> AsyncIterator[list[Any]]:
    if isinstance(items, list):
        for start in range(0, len(items), length):
            yield items[start : start + length]
        return
    async for part in in_runs(runtime.results.items(items), length):
        yield part
