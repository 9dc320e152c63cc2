"""The collection of a loop: evaluated once, stored in the log or by reference, read back on resumption."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import ToolError
from noetl_dagster.events.connection import encode_json
from noetl_dagster.playbook.templates.rendering import render_async, with_references
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.playbook.templates.views import DataView, ResultView
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.storage.manifests import Strategy, in_runs, strategy_of
from noetl_dagster.storage.store import NewResult, ResultStore
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.program import StepProgram

PART_ITEMS = 2_000
"""Items of one stored part of a collection, at most."""

PART_BYTES = 4 * 1024**2
"""JSON bytes of one stored part, about."""

PARTS_AT_ONCE = 8

SAMPLE = 50
"""Items whose average size determines the number of items in a part."""


class Collection:
    """The items of a loop: in memory when few, else in stored parts, of which the latest is cached.

    Args:
        reference: manifest of the parts, each of ``part_items`` items but the last.
    """

    def __init__(
        self,
        items: Sequence[Any] = (),
        *,
        store: ResultStore | None = None,
        reference: ResultRef | None = None,
        size: int = 0,
        part_items: int = PART_ITEMS,
    ) -> None:
        self._items = items
        self._store = store
        self._reference = reference
        self._size = len(items) if reference is None else size
        self._part_items = part_items
        self._held: tuple[int, Sequence[Any]] = (-1, ())

    def __len__(self) -> int:
        return self._size

    @property
    def length(self) -> int | None:
        """The number of items; None while it is not known."""
        return self._size

    async def slice(self, start: int, stop: int) -> Sequence[Any]:
        """Returns the items of ``start <= index < stop``; reads only the parts that hold them.

        Raises:
            StorageError: a part cannot be read.
        """
        if self._reference is None:
            return self._items[start:stop]
        found: list[Any] = []
        stop = min(stop, self._size)
        while start < stop:
            part = start // self._part_items
            first = part * self._part_items
            items = (await self._part(part))[start - first : stop - first]
            found.extend(items)
            start += len(items)
        return found

    async def _part(self, number: int) -> Sequence[Any]:
        held, items = self._held
        if held != number:
            assert self._store is not None
            assert self._reference is not None
            async for part in self._store.parts(self._reference, number, number + 1):
                items = await self._store.get(part)
            self._held = number, items
        return items


class UnknownItems(Collection):
    """The items of a loop that does not know them beforehand."""

    @property
    def length(self) -> int | None:
        """None: the number is not known."""
        return None


class Partitions(Collection):
    """A collection in ranges of ``items_each`` items, each an item ``{start, stop}`` itself."""

    def __init__(self, collection: Collection, items_each: int) -> None:
        super().__init__()
        self.collection = collection
        self._items_each = items_each
        self._size = -(-len(collection) // items_each)

    async def slice(self, start: int, stop: int) -> Sequence[Any]:
        """Returns the partitions ``start <= number < stop``."""
        each, last = self._items_each, len(self.collection)
        return [
            {"start": place * each, "stop": min((place + 1) * each, last)}
            for place in range(start, min(stop, self._size))
        ]


async def evaluate_collection(runtime: Runtime, program: StepProgram, scope: Scope) -> list[Any] | ResultRef:
    """Returns the items of a loop, in order, or a reference to many items that are stored already.

    Raises:
        ToolError: the value of ``in`` cannot be iterated over.
        TemplateError: ``in`` cannot be rendered.
    """
    wanted = program.collection
    assert wanted is not None
    if wanted.is_expression and not wanted.is_fresh:  # a path, which may refer to a stored result
        value = await with_references(partial(wanted.evaluate, scope), runtime.results.get)
        stored = _stored(value)
        if stored is not None and _is_list(stored):
            if (stored.rows or 0) > runtime.settings.loop_collection_threshold:
                return stored
            return [item async for item in runtime.results.items(stored)]
    return as_items(await render_async(wanted, scope, runtime.results.get), program.step.name)


def _stored(value: Any) -> ResultRef | None:
    """Returns the reference of the result that a template evaluates to, or None when it is in memory."""
    if isinstance(value, ResultView):
        return (
            None if value.is_loop else value.stored
        )  # a loop's results are more than the items of its parts
    return value.stored if isinstance(value, DataView) else None


def _is_list(reference: ResultRef) -> bool:
    """Reports that a stored result is a list or table of known length. A mapping around rows is not."""
    joined = strategy_of(reference) in (Strategy.APPEND, Strategy.CONCAT)
    return reference.rows is not None and (reference.kind is not RefKind.MANIFEST or joined)


def as_items(value: Any, step: str) -> list[Any]:
    """Returns a list as it is, a mapping as ``{key, value}`` pairs, and parses the JSON text of either.

    Raises:
        ToolError: the value is something else; the message names the step and the value.
    """
    if isinstance(value, (str, bytes)):
        value = _parsed(value, step)
    if isinstance(value, Mapping):
        if isinstance(value.get("results"), list) and "total" in value:  # the result of another loop
            return list(value["results"])
        return [{"key": key, "value": item} for key, item in value.items()]
    if isinstance(value, (Sequence, set, frozenset)):
        return list(value)
    if isinstance(value, Iterable):
        return list(value)
    raise not_a_list(value, step)


def _parsed(text: str | bytes, step: str) -> Any:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise not_a_list(text, step) from None
    if not isinstance(value, (list, dict)):
        raise not_a_list(text, step)
    return value


def not_a_list(value: Any, step: str) -> ToolError:
    """Makes the error of a value that cannot be iterated over."""
    return ToolError(
        f"step {step}: loop.in gave {type(value).__name__} {str(value)[:80]!r}, which is not a list; "
        "give a list, a mapping, or the JSON text of one",
        kind="loop",
    )


async def keep_collection(
    runtime: Runtime,
    execution: Execution,
    step: str,
    items: list[Any] | ResultRef,
    loop_id: str,
    *,
    partitions: int | None = None,
) -> tuple[dict[str, Any], Collection]:
    """Stores a collection: in the event while its items are few and small, else in parts.

    ``collection_ref`` of stored parts refers to an object that lists the parts, for external readers.

    Args:
        items: from :func:`evaluate_collection`. Stored items pass through memory a few parts at a time.
        partitions: makes it :class:`Partitions`, at least this many if there are enough items.

    Returns:
        The context of ``loop.started``, and the stored collection.
    """
    settings = runtime.settings
    size = items.rows or 0 if isinstance(items, ResultRef) else len(items)
    part_items = _items_a_part(await _sample(runtime, items))
    shape: dict[str, Any] = {}
    if partitions is not None:
        part_items = shape["partition_items"] = max(1, min(part_items, -(-size // partitions)))
    few = isinstance(items, list) and size <= settings.loop_collection_threshold
    if few and len(encode_json(items)) <= settings.inline_result_bytes:
        context = {"collection": items, **shape}
        return context, kept_collection(runtime, context)
    name, parts = (
        f"collection-{loop_id}",
        _stored_parts(runtime, execution.id, step, items, part_items, loop_id),
    )
    uris: list[str] = []

    async def noted() -> AsyncIterator[ResultRef]:
        async for part in parts:
            uris.append(part.physical_uri)
            yield part

    reference = await runtime.results.manifest(execution.id, step, name, noted(), Strategy.CONCAT)
    index = await runtime.results.put(
        {"collection_size": size, "part_items": part_items, "parts": uris},
        execution_id=execution.id,
        step=step,
        name=f"{name}-index",
        parent_ref_id=reference.ref_id,
    )
    context = {
        "collection_ref": index.physical_uri,
        "collection_reference": reference.model_dump(mode="json", exclude_defaults=True),
        "collection_size": size,
        "part_items": part_items,
        **shape,
    }
    return context, kept_collection(runtime, context)


def kept_collection(runtime: Runtime, context: dict[str, Any]) -> Collection:
    """Returns the collection that :func:`keep_collection` stored; its parts are read when they are needed."""
    if "collection" in context:
        collection = Collection(context["collection"])
    else:
        collection = Collection(
            store=runtime.results,
            reference=ResultRef.model_validate(context["collection_reference"]),
            size=context["collection_size"],
            part_items=context["part_items"],
        )
    items_each = context.get("partition_items")
    return collection if items_each is None else Partitions(collection, items_each)


def _items_a_part(sample: Sequence[Any]) -> int:
    average = max(1, len(encode_json(sample)) // max(1, len(sample)))
    return max(1, min(PART_ITEMS, PART_BYTES // average))


async def _sample(runtime: Runtime, items: list[Any] | ResultRef) -> list[Any]:
    if isinstance(items, list):
        return items[:: max(1, len(items) // SAMPLE)]
    sample: list[Any] = []
    async for item in runtime.results.items(items):
        sample.append(item)
        if len(sample) == SAMPLE:
            break
    return sample


async def _stored_parts(
    runtime: Runtime,
    execution_id: int,
    step: str,
    items: list[Any] | ResultRef,
    part_items: int,
    loop_id: str,
) -> AsyncIterator[ResultRef]:
    """Stores the parts a few at a time, in order."""
    batch: list[NewResult] = []
    start = 0
    async for part in _parts_of(runtime, items, part_items):
        batch.append(NewResult(part, execution_id, step, f"collection-{loop_id}-{start}"))
        start += len(part)
        if len(batch) == PARTS_AT_ONCE:
            for reference in await runtime.results.put_many(batch):
                yield reference
            batch = []
    for reference in await runtime.results.put_many(batch):
        yield reference


async def _parts_of(
    runtime: Runtime, items: list[Any] | ResultRef, part_items: int
) -> AsyncIterator[list[Any]]:
    if isinstance(items, list):
        for start in range(0, len(items), part_items):
            yield items[start : start + part_items]
        return
    async for part in in_runs(runtime.results.items(items), part_items):
        yield part
