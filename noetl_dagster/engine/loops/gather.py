"""The result of a loop, gathered from the log without its items in memory, and its writes to ``ctx``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.connection import encode_json
from noetl_dagster.events.envelopes import ERROR, OK, Envelope, from_result
from noetl_dagster.events.queries import LOOP_ENDS
from noetl_dagster.playbook.templates.views import is_envelope
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import StoreTier
from noetl_dagster.storage.store import NewResult

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
    def done(self) -> int:
        """Number of successful iterations."""
        return int(self.envelope["done"])

    @property
    def failed(self) -> int:
        """Number of failed iterations."""
        return int(self.envelope["failed"])


async def iteration_ends(
    runtime: Runtime,
    execution_id: int,
    loop_ids: Sequence[str],
    start: int = 0,
    stop: int | None = None,
    *,
    sequences: bool = False,
) -> AsyncIterator[IterationEnd]:
    """Yields the iterations that ended, in item order, read page by page.

    Args:
        loop_ids: activations of one loop, resumed ones included.
        start, stop: half-open range of indexes.
        sequences: the attempts of an iteration follow from each other, as its ``retry`` block says, and the
            last one counts: a page that could not be fetched fails an iteration whose first page came.
    """
    while stop is None or start < stop:
        until = start + PAGE if stop is None else min(start + PAGE, stop)
        rows = await runtime.pool.fetch(LOOP_ENDS, execution_id, list(loop_ids), start, until)
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
    runtime: Runtime,
    execution_id: int,
    step: str,
    loop_ids: Sequence[str],
    total: int,
    *,
    stop: int | None = None,
    flat: bool = False,
    sequences: bool = False,
    counts: Callable[[IterationEnd], bool] | None = None,
) -> LoopResult:
    """Builds the result of a loop that ended: inline while small, else a manifest over its parts.

    Args:
        total: the expected number of iterations; 0 if it is not known.
        stop: the index after the last iteration, if it differs from ``total``.
        flat: each iteration's result is a list of results, and the loop's result is those end to end.
        sequences: see :func:`iteration_ends`.
        counts: selects the ends that count for the result; by default all.
    """
    collector = _Collector(runtime, execution_id, step, loop_ids[-1], flat=flat)
    async for end in iteration_ends(
        runtime, execution_id, loop_ids, 0, (total or None) if stop is None else stop, sequences=sequences
    ):
        if counts is None or counts(end):
            await collector.add(end)
    return await collector.finish(total)


class _Collector:
    def __init__(
        self, runtime: Runtime, execution_id: int, step: str, loop_id: str, *, flat: bool = False
    ) -> None:
        self._runtime = runtime
        self._flat = flat
        self._where = (execution_id, step)
        self._loop_id = loop_id
        self._limit = runtime.settings.inline_result_bytes
        self._inline: list[Envelope] | None = []
        self._inline_bytes = 0
        self._bundle: list[Any] = []
        self._parts: list[ResultRef] = []
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
            return
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
        if self._inline is not None:
            self._inline_bytes += len(encode_json(_as_json(envelope)))
            self._inline.append(envelope)
            if self._inline_bytes > self._limit:
                waiting, self._inline = self._inline, None
                self._by_item = not self._flat and any("ref" in item for item in waiting)
                for item in waiting:
                    await self._add_part(item)
            return
        await self._add_part(envelope)

    async def _add_part(self, envelope: Envelope) -> None:
        if self._flat and "ref" in envelope:
            self._bundle.append(_as_json(envelope))
            return
        if "ref" in envelope and not self._by_item:
            await self._flush_bundle()
            self._by_item = True
        if "ref" in envelope:
            await self._flush_bundle()
            self._parts.append(envelope["ref"])
            return
        self._bundle.append(envelope["data"] if envelope["status"] == OK else envelope)
        if len(self._bundle) >= BUNDLE:
            await self._flush_bundle()

    async def _flush_bundle(self) -> None:
        """Stores the waiting small results: together, or one by one where each part is one item."""
        if not self._bundle:
            return
        bundle, self._bundle = self._bundle, []
        execution_id, step = self._where
        start = len(self._parts)
        if not self._by_item:
            name = f"{self._loop_id}-bundle-{start}"
            reference = await self._runtime.results.put(
                bundle, execution_id=execution_id, step=step, name=name
            )
            self._parts.append(reference)
            return
        items = [
            NewResult(
                value, execution_id, step, f"{self._loop_id}-item-{start + place}", tier=StoreTier.EVENTLOG
            )
            for place, value in enumerate(bundle)
        ]
        self._parts.extend(await self._runtime.results.put_many(items))

    async def finish(self, total: int) -> LoopResult:
        ended = self._done + self._failed
        envelope: Envelope = {
            "status": ERROR if self._failed else OK,
            "total": max(total, ended),
            "done": self._done,
            "failed": self._failed,
        }
        if self._inline is not None:
            envelope["results"] = [_as_json(item) for item in self._inline]
        else:
            await self._flush_bundle()
            execution_id, step = self._where
            envelope["ref"] = await self._runtime.results.manifest(
                execution_id,
                step,
                f"loop-{self._loop_id}",
                self._parts,
                "append" if self._by_item else "concat",
            )
        self._result.envelope = envelope
        return self._result


def _as_json(envelope: Envelope) -> Envelope:
    reference = envelope.get("ref")
    if isinstance(reference, ResultRef):
        return envelope | {"ref": reference.model_dump(mode="json", exclude_defaults=True)}
    return envelope


Path = tuple[str, ...]


def merge_patches(
    patches: Iterable[tuple[int, Sequence[str], Any]], ctx: Mapping[str, Any]
) -> tuple[dict[Path, Any], list[str]]:
    """Merges the writes of iterations that ran side by side.

    All of them read the same context, so lists that grew from the one they read are joined in item order. Of other
    different values the last item's wins. Within one item its last write counts.

    Args:
        patches: ``(index, path, value)`` in item order.
        ctx: the context that the iterations read.

    Returns:
        The value of each path, and the names that got different values.
    """
    last = {(index, tuple(path)): value for index, path, value in patches}
    written: dict[Path, list[Any]] = {}
    for (_, path), value in last.items():
        written.setdefault(path, []).append(value)
    merged: dict[Path, Any] = {}
    conflicts = []
    for path, values in written.items():
        tails = _tails(_at(ctx, path), values)
        if tails is not None:
            merged[path] = [*_at(ctx, path), *(item for tail in tails for item in tail)]
            continue
        merged[path] = values[-1]
        if any(value != values[-1] for value in values):
            conflicts.append(".".join(path))
    return merged, sorted(conflicts)


def _tails(base: Any, values: list[Any]) -> list[list[Any]] | None:
    """Returns the items that each value appends to ``base``, or None when one of them does not start with it."""
    if not isinstance(base, list):
        return None
    grown = [isinstance(value, list) and value[: len(base)] == base for value in values]
    return [value[len(base) :] for value in values] if all(grown) else None


def _at(ctx: Mapping[str, Any], path: Path) -> Any:
    value: Any = ctx
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
