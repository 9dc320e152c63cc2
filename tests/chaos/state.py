"""What a run leaves behind: it must equal that of a run that nothing disturbed."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson

from noetl_dagster.engine.executions.results import value_of
from noetl_dagster.engine.recovery.verify import verify
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.events.projection import Projection
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.settings import Settings
from noetl_dagster.storage.placement import KEY_ROOT

DONE = """
SELECT node_name, current_index, count(*) FROM noetl.event
WHERE execution_id = $1 AND event_type IN ('command.completed', 'loop.shard.done') GROUP BY 1, 2
"""
LEFT = """
SELECT 'commands in the queue' AS what, count(*) FROM noetl.queue WHERE execution_id = $1
UNION ALL SELECT 'frames of a cursor', count(*) FROM noetl.cursor_frame WHERE execution_id = $1
UNION ALL SELECT 'dead letters', count(*) FROM noetl.dead_letter
"""
OBJECTS = "SELECT physical_uri FROM noetl.result_ref WHERE execution_id = $1"
ORPHANS_FROM = timedelta(days=2)


@dataclass(frozen=True, slots=True)
class EndState:
    """What is compared.

    Attributes:
        results: SHA-256 of the value of each step.
        done: how often each step or iteration ended well.
        rows: what the targets hold.
    """

    status: ExecutionStatus
    results: dict[str, str]
    done: dict[str, int]
    rows: list[tuple[Any, ...]]

    def differences(self, undisturbed: EndState) -> list[str]:
        """Returns a line for each difference, which begins with lost, doubled or different."""
        found = []
        if self.status is not undisturbed.status:
            found.append(f"lost: the execution is {self.status}")
        for step, digest in undisturbed.results.items():
            if self.results.get(step) != digest:
                found.append(f"{'different' if step in self.results else 'lost'}: the result of {step}")
        for what in sorted(self.done.keys() | undisturbed.done.keys()):
            now, once = self.done.get(what, 0), undisturbed.done.get(what, 0)
            if now != once:
                found.append(f"{'lost' if now < once else 'doubled'}: {what} ended {now} times and not {once}")
        rows, once_rows = (Counter(map(repr, one.rows)) for one in (self, undisturbed))
        for word, missing in (("lost", once_rows - rows), ("doubled", rows - once_rows)):
            if missing:
                found.append(f"{word}: {missing.total()} rows of a target, such as {next(iter(missing))}")
        return found


@dataclass(frozen=True, slots=True)
class Remains:
    """What must not be there: ``defects`` are lines as of :meth:`EndState.differences`.

    Attributes:
        swept: objects without a reference, which maintenance has removed; a killed process leaves some.
    """

    defects: list[str]
    swept: int


async def end_state(settings: Settings, execution_id: int, rows: list[tuple[Any, ...]], *, per_item: bool) -> EndState:
    """Reads how an execution ended.

    Args:
        per_item: whether iterations, and so results, are the same in each run.
    """
    runtime = await Runtime.open(settings, apply=False)
    try:
        execution = await runtime.load(execution_id)
        results = {}
        for step, end in execution.state.latest.items() if per_item else ():
            value = await value_of(runtime, end.envelope)
            text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS, default=str)
            results[step] = hashlib.sha256(text).hexdigest()
        done = {
            f"{node}[{index}]": count
            for node, index, count in await runtime.pool.fetch(DONE, execution_id)
            if per_item or index is None
        }
        return EndState(execution.state.status, results, done, rows)
    finally:
        await runtime.close()


async def remains(settings: Settings, execution_id: int) -> Remains:
    """Checks the log, the projection and the stores, and looks for work that is left and objects without a reference."""
    runtime = await Runtime.open(settings, apply=False)
    try:
        pool, store = runtime.pool, runtime.results
        await Projection(pool).catch_up(patient=True)
        report = await verify(pool, store, execution_id)
        defects = [f"broken: {rule}: {found[0]}" for rule, found in report.findings.examples.items()]
        defects += [f"broken: {name} was not checked: {why}" for name, why in report.unchecked.items()]
        defects += [f"left: {count} {what}" for what, count in await pool.fetch(LEFT, execution_id) if count]
        swept = await store.sweep_orphans(datetime.now(UTC) + ORPHANS_FROM)
        known = {row["physical_uri"] for row in await pool.fetch(OBJECTS, execution_id)}
        folders = tuple(uri for uri in known if uri.endswith("/"))
        for name in store._placement.lasting():
            tier = store._placement.tier(name)
            async for keys in tier.keys(f"{KEY_ROOT}{execution_id}/"):
                uris = map(tier.uri, keys)
                defects += [f"orphaned: {uri}" for uri in uris if uri not in known and not uri.startswith(folders)]
        return Remains(defects, swept)
    finally:
        await runtime.close()
