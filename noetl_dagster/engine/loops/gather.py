"""The result of a loop, gathered from the log without its items in memory, and its writes to ``ctx``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from noetl_dagster.engine.loops.loop_run import LoopRun
from noetl_dagster.errors import LostEventsError
from noetl_dagster.events.connection import PATIENCE
from noetl_dagster.events.envelopes import ERROR, OK, Envelope, as_json, from_result
from noetl_dagster.events.queries import LOOP_ENDS
from noetl_dagster.events.types import EventType
from noetl_dagster.playbook.templates.views import is_envelope
from noetl_dagster.process.retrying import with_retries
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage.manifests import Strategy
from noetl_dagster.storage.store import NewResult
from noetl_dagster.values import encode_json

PAGE = 2_000
"""Iterations read from the log at a time."""

BUNDLE = 1_000
"""Small results stored together as one part of a manifest."""


@dataclass(slots=True)
class IterationEnd:
    """The end of an iteration: its latest attempt or, if attempts are independent, preferably a success."""

    index: int
    attempt: int
    envelope: Envelope
    patches: list[tuple[list[str], Any]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Reports a failed iteration."""
        return bool(self.envelope["status"] != OK)


@dataclass(slots=True)
class LoopResult:
    """Result of a loop.

    Attributes:
        envelope: ``status``, ``total``, ``done``, ``failed`` and the items: inline or behind ``ref``.
        patches: the writes of the iterations to ctx, in item order: ``(index, path, value)``.
        errors: messages of the first failed iterations.
    """

    envelope: Envelope
    patches: list[tuple[int, list[str], Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of iterations: ``total``, ``done`` and ``failed``."""
        return {key: self.envelope[key] for key in ("total", "done", "failed")}

    @property
    def fanin_status(self) -> str:
        """``complete``, ``partial`` or ``failed``."""
        if not self.envelope["failed"]:
            return "complete"
        return "partial" if self.envelope["done"] else "failed"


async def iteration_ends(
    loop_run: LoopRun, stop: int | None = None, *, sequences: bool = False
) -> AsyncIterator[IterationEnd]:
    """Yields the iterations that ended, in item order, read page by page; those of continued runs too.

    Args:
        stop: the index after the last iteration; None: after the last in the log.
        sequences: the attempts of an iteration follow from each other, as its ``retry`` block says, and the
            last one counts: a page that could not be fetched fails an iteration whose first page came.
    """
    start, place = 0, (loop_run.execution.id, list(loop_run.loop_ids))
    while stop is None or start < stop:
        until = start + PAGE if stop is None else min(start + PAGE, stop)
        rows = await loop_run.runtime.reads.fetch(LOOP_ENDS, *place, start, until)
        current: IterationEnd | None = None
        for row in rows:
            end = IterationEnd(
                row["current_index"],
                row["attempt"],
                from_result(row["result"]),
                (row["context"] or {}).get("patches", []),
            )
            if current is not None and current.index == end.index:
                if sequences or current.failed or not end.failed:
                    current = end
                continue
            if current is not None:
                yield current
            current = end
        if current is not None:
            yield current
        if not rows and stop is None:
            return
        start = until


async def gather(
    loop_run: LoopRun,
    *,
    stop: int | None = None,
    flat: bool = False,
    sequences: bool = False,
    counts: Callable[[IterationEnd], bool] = lambda end: True,
) -> LoopResult:
    """Builds the result of a loop that ended: inline while small, else a manifest over its parts.

    Writes ``loop.done``, or ``loop.fanin.completed``; the log keeps the first.

    Args:
        stop: the index after the last iteration, if it differs from the number of items.
        flat: each iteration's result is a list of results, and the loop's result is those end to end.
        sequences: see :func:`iteration_ends`.
        counts: selects the ends that count for the result.

    Raises:
        LostEventsError: an item that was done in this process has no end in the log.
    """
    collector, total, runtime = _Collector(loop_run, flat), len(loop_run.items), loop_run.runtime
    ends_with_all = stop is None
    stop = (total or None) if stop is None else stop
    async for end in iteration_ends(loop_run, stop, sequences=sequences):
        if counts(end):
            await collector.add(end)
    if ends_with_all:
        collector.check_all_ended(total)
    result = await collector.finish(total)
    state, numbers = loop_run.execution.state, result.counts
    type_, status, shown = EventType.LOOP_DONE, "completed", result.envelope["status"]
    if loop_run.shard:
        type_ = EventType.LOOP_FANIN_COMPLETED
        status = shown = result.fanin_status
    else:
        numbers["completed"] = numbers["done"]
    meta = {"loop_id": loop_run.loop_id, "collection_size": total, **numbers}
    event = runtime.event(state, type_, loop_run.step, "loop", status, meta)
    event.result = {"status": shown, "context": numbers}
    state.apply(event)
    await with_retries(partial(runtime.log.append_once, event), PATIENCE)
    return result


class _Collector:
    def __init__(self, loop_run: LoopRun, flat: bool) -> None:
        self._store = loop_run.runtime.results
        self._flat = flat
        self._where = (loop_run.execution.id, loop_run.step)
        loop = loop_run.program.loop
        self._stops_at_a_failure = loop.fail_fast or (loop_run.shard and loop.fanout.fail_fast)
        self._loop_id = loop_run.loop_id
        self._limit = loop_run.runtime.settings.inline_result_bytes
        self._inline: list[Envelope] | None = []
        self._inline_bytes = 0
        self._bundle: list[Any] = []
        self._parts: list[ResultRef] = []
        self._bundles: list[ResultRef] = []  # parts of several items, before the first that is one item
        self._by_item = False
        self._failed = 0
        self._done = 0
        self._result = LoopResult({})

    async def add(self, end: IterationEnd) -> None:
        self._done += not end.failed
        self._failed += end.failed
        if end.failed and len(self._result.errors) < 5:
            self._result.errors.append(f"item {end.index}: {end.envelope['error']['message']}")
        self._result.patches.extend((end.index, path, value) for path, value in end.patches)
        envelope = {key: value for key, value in end.envelope.items() if key != "meta"}
        if self._flat and not end.failed:
            await self._add_list(envelope)
        else:
            await self._add_one(envelope)

    async def _add_list(self, envelope: Envelope) -> None:
        """Adds a list of results: each as if it were an iteration's own, or a stored part with all of them."""
        reference = envelope.get("ref")
        if reference is None:
            for item in envelope["data"]:
                await self._add_one(item if is_envelope(item) else {"status": OK, "data": item})
            return
        waiting, self._inline = self._inline or [], None
        for item in waiting:
            await self._add_part(item)
        await self._flush_bundle()
        self._parts.append(reference)

    async def _add_one(self, envelope: Envelope) -> None:
        if self._inline is None:
            await self._add_part(envelope)
            return
        self._inline_bytes += len(encode_json(as_json(envelope)))
        self._inline.append(envelope)
        if self._inline_bytes > self._limit:
            waiting, self._inline = self._inline, None
            self._by_item = not self._flat and any("ref" in item for item in waiting)
            for item in waiting:
                await self._add_part(item)

    async def _add_part(self, envelope: Envelope) -> None:
        if "ref" in envelope and not self._flat:
            await self._flush_bundle()
            if not self._by_item:
                self._by_item, self._bundles, self._parts = True, self._parts, []
            self._parts.append(envelope["ref"])
            return
        is_value = envelope["status"] == OK and "ref" not in envelope
        self._bundle.append(envelope["data"] if is_value else as_json(envelope))
        if len(self._bundle) >= BUNDLE:
            await self._flush_bundle()

    async def _flush_bundle(self) -> None:
        """Stores the waiting small results: together, or one by one where each part is one item."""
        if not self._bundle:
            return
        bundle, self._bundle = self._bundle, []
        start = len(self._parts)
        new = [NewResult(bundle, *self._where, f"{self._loop_id}-bundle-{start}")]
        if self._by_item:
            name = f"{self._loop_id}-item-"
            new = [
                NewResult(value, *self._where, f"{name}{number}", tier=StoreTier.EVENTLOG)
                for number, value in enumerate(bundle, start)
            ]
        self._parts.extend(await self._store.put_many(new))

    def check_all_ended(self, total: int) -> None:
        """Raises ``LostEventsError`` if items have no end in the log, unless a failure has stopped the loop."""
        missing = total - self._done - self._failed
        if missing > 0 and not (self._failed and self._stops_at_a_failure):
            execution_id, step = self._where
            raise LostEventsError(
                f"step {step}: the event log has no end of {missing} of {total} items, although they are done: it has "
                f"lost events, as after a failover to an asynchronous standby; 'noetl-dagster resume {execution_id}' "
                "runs these items again"
            )

    async def finish(self, total: int) -> LoopResult:
        envelope: Envelope = {
            "status": ERROR if self._failed else OK,
            "total": max(total, self._done + self._failed),
            "done": self._done,
            "failed": self._failed,
        }
        if self._inline is not None:
            envelope["results"] = [as_json(item) for item in self._inline]
        else:
            await self._flush_bundle()
            name, strategy = f"loop-{self._loop_id}", Strategy.APPEND if self._by_item else Strategy.CONCAT
            if self._bundles:
                items = await self._store.manifest(*self._where, f"{name}-items", self._parts, strategy)
                self._parts, strategy = [*self._bundles, items], Strategy.CONCAT
            envelope["ref"] = await self._store.manifest(*self._where, name, self._parts, strategy)
        self._result.envelope = envelope
        return self._result


Path = tuple[str, ...]


def merge_patches(
    patches: Iterable[tuple[int, Sequence[str], Any]], ctx: Mapping[str, Any]
) -> tuple[dict[Path, Any], list[str]]:
    """Merges the writes (``patches``) of iterations that ran side by side, in item order.

    All of them read the same ``ctx``, so lists that grew from the one they read are joined. Of other different values
    the last item's wins. Within one item its last write counts. Returns the value of each path, and the names that got
    different values.
    """
    last = {(index, tuple(path)): value for index, path, value in patches}
    written: dict[Path, list[Any]] = {}
    for (_, path), value in last.items():
        written.setdefault(path, []).append(value)
    merged: dict[Path, Any] = {}
    conflicts = []
    for path, values in written.items():
        base: Any = ctx
        for key in path:
            base = base.get(key) if isinstance(base, Mapping) else None
        if isinstance(base, list) and all(_begins_with(value, base) for value in values):
            merged[path] = [*base, *(item for value in values for item in value[len(base) :])]
            continue
        merged[path] = values[-1]
        if any(value != values[-1] for value in values):
            conflicts.append(".".join(path))
    return merged, sorted(conflicts)


def _begins_with(value: Any, base: list[Any]) -> bool:
    return isinstance(value, list) and value[: len(base)] == base
