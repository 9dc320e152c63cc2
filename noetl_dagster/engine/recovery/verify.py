"""Checks executions: events against their rules, the projection, references and objects; and repairs what is safe.

Events, queue and projection are read in one snapshot for each page of executions, so executions may run meanwhile. What
looks wrong is checked once more in a later snapshot.

Results whose bytes are missing can be forgotten, so that a resumption makes them again. The rows of the references are
deleted, and an event names the visits of steps that they belong to. From the next epoch on, these have not ended, and
commands whose reference is gone run again as new attempts; see
:meth:`~noetl_dagster.events.state.ExecutionState.end_of`. The others keep their results.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import asyncpg

from noetl_dagster.engine.pool.reaper import Reaper
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.errors import NoetlError
from noetl_dagster.events.ids import Snowflake, process_node
from noetl_dagster.events.log import EventLog
from noetl_dagster.events.projection import Projection, differing
from noetl_dagster.events.rules import AGAIN, QUEUED, SUBJECTS, Finding, Findings, Rule, broken_rules
from noetl_dagster.events.state import ExecutionStatus, StepStatus
from noetl_dagster.events.transport.handler import EventHandler
from noetl_dagster.events.types import EventType
from noetl_dagster.playbook.models import LoopMode
from noetl_dagster.storage.checking import ORPHAN, STORES
from noetl_dagster.storage.store import ORPHAN_GRACE, ResultStore
from noetl_dagster.worker.command import CommandEvents
from noetl_dagster.worker.execution import Execution

PAGE = 100
"""Executions that are checked in one snapshot."""

RECHECK_SECONDS = 0.5
"""Pause before the second look at what seems to be wrong."""

PROJECTION = Rule(
    "execution.misprojected",
    "the row of an execution in noetl.execution differs from a replay of its events",
    "'noetl-dagster verify --repair' replays these executions; 'noetl-dagster replay --all' replays all of them",
)
UNREADABLE = Rule(
    "execution.unreadable",
    "an event has a value that cannot be read, so that not all rules could be checked",
    AGAIN,
)
RULES = {
    rule.name: rule for rule in (*(rule for _, rules in SUBJECTS for rule in rules), UNREADABLE, PROJECTION, *STORES)
}
"""Every rule by its name."""

# The next executions; those of the log by one look into its index for each.
_PAGE_OF_EXECUTIONS = """
WITH RECURSIVE logged AS (
    (SELECT execution_id FROM noetl.event WHERE execution_id > $1 ORDER BY execution_id LIMIT 1)
    UNION ALL
    SELECT (SELECT execution_id FROM noetl.event WHERE execution_id > logged.execution_id
            ORDER BY execution_id LIMIT 1)
    FROM logged WHERE execution_id IS NOT NULL
)
SELECT execution_id FROM (
    (SELECT execution_id FROM logged WHERE execution_id IS NOT NULL LIMIT $2)
    UNION (SELECT execution_id FROM noetl.execution WHERE execution_id > $1 ORDER BY execution_id LIMIT $2)
    UNION (SELECT execution_id FROM noetl.queue WHERE execution_id > $1 ORDER BY execution_id LIMIT $2)) known
ORDER BY execution_id LIMIT $2
"""
_IS_KNOWN = "SELECT EXISTS (SELECT FROM noetl.event WHERE execution_id = $1)"

# Rows of commands that have ended or were never issued.
_REMOVE_ENDED = f"""
DELETE FROM noetl.queue USING ({QUEUED}) facts
WHERE queue.execution_id = facts.execution_id AND command_id = place AND (has_ended OR unissued)
  AND queue.status = 'queued'
RETURNING command_id
"""


@dataclass(slots=True)
class Report:
    """The outcome of a check.

    Attributes:
        executions, references: how many were checked.
        bytes: of objects that were read.
        findings: what was wrong, before any repair.
        unchecked: why stores could not be checked, by name.
        skipped: references to stores that this process does not have, by tier.
        repairs: what was repaired.
        missing: references whose bytes are missing or damaged, by execution.
    """

    executions: int = 0
    references: int = 0
    bytes: int = 0
    findings: Findings = field(default_factory=Findings)
    unchecked: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    repairs: list[str] = field(default_factory=list)
    missing: dict[int, list[int]] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """True if everything could be checked and nothing is wrong."""
        return not self.findings.counts and not self.unchecked

    def __str__(self) -> str:
        lines = [f"{self.executions} executions and {self.references} stored results checked"]
        for rule, count in self.findings.counts.items():
            lines.append(f"{rule}: {count}: {RULES[rule].what}")
            lines += [f"  {_shown(one)}" for one in self.findings.examples[rule]]
        lines += [f"{store} could not be checked: {why}" for store, why in self.unchecked.items()]
        return "\n".join([*lines, *self.repairs])


Note = Callable[[str], None]


async def verify(
    pool: asyncpg.Pool,
    results: ResultStore,
    execution_id: int | None = None,
    *,
    quick: bool = False,
    repair: bool = False,
    note: Note = lambda text: None,
) -> Report:
    """Checks one execution, or all of them with the stores, and repairs what is safe if that is asked for.

    Executions may run meanwhile. A repair may be repeated.

    Args:
        quick: compare the sizes of objects, without reading them.
        note: is called with the progress.

    Raises:
        LookupError: there is no such execution.
    """
    if execution_id is not None and not await pool.fetchval(_IS_KNOWN, execution_id):
        raise LookupError(f"no execution {execution_id} in the event log")
    check = _Check(pool, results, execution_id, quick, note)
    await check.log()
    await check.stores()
    if repair:
        await check.repair()
    return check.report


class _Check:
    """One check and its report."""

    def __init__(
        self, pool: asyncpg.Pool, results: ResultStore, execution_id: int | None, quick: bool, note: Note
    ) -> None:
        self._pool = pool
        self._results = results
        self._execution_id = execution_id
        self._quick = quick
        self._note = note
        self._broken: list[int] = []
        """Executions whose row of the projection differs."""
        self._queued: list[int] = []
        """Executions with rows of the queue that are not needed."""
        self.report = Report()

    async def log(self) -> None:
        """Checks events, queue, references and projection."""
        async for ids in self._pages():
            findings, different = await self._page(ids)
            if findings.counts or different:
                await asyncio.sleep(RECHECK_SECONDS)
                later, still = await self._page(ids)
                findings, different = findings.confirmed_by(later), sorted({*different} & {*still})
            self._queued += [one.execution_id for one in findings.examples.get("queue.ended", ()) if one.execution_id]
            self._broken += different
            self.report.findings.merge(findings)
            for one in different:
                self.report.findings.add(Finding(PROJECTION.name, one, place="noetl.execution"))
            self.report.executions += len(ids)
            self._note(f"{self.report.executions} executions checked")

    async def stores(self) -> None:
        """Checks references and objects."""
        objects, report = self._results.check(quick=self._quick), self.report
        async for ref, rule in objects.damaged(self._execution_id):
            place = f"{ref.name} at {ref.physical_uri[:200]}"
            report.missing.setdefault(ref.execution_id, []).append(ref.ref_id)
            report.findings.add(Finding(rule.name, ref.execution_id, ref.source_step, None, place))
            self._note(f"{objects.references} stored results checked")
        before = datetime.now(UTC) - ORPHAN_GRACE
        async for uri in objects.orphans(before, self._execution_id):
            report.findings.add(Finding(ORPHAN.name, None, place=uri))
        report.references, report.bytes = objects.references, objects.bytes
        report.unchecked, report.skipped = objects.unchecked, dict(objects.skipped)

    async def repair(self) -> None:
        """Repairs the projection, the queue and orphans."""
        counts, repairs = self.report.findings.counts, self.report.repairs
        if self._broken:
            await Projection(self._pool).rebuild_some(self._broken)
            repairs.append(f"execution.misprojected: {len(self._broken)} executions replayed")
        if "queue.dead" in counts:
            ids, lease = Snowflake(process_node()), self._results.settings.command_heartbeat_timeout_seconds
            handler = EventHandler(EventLog(self._pool, ids), lease)
            repairs.append(f"queue.dead: {await Reaper(self._pool, handler, CommandEvents(ids)).reap()}")
        if self._queued:  # after the reaper, which takes back their claims
            removed = await self._pool.fetch(_REMOVE_ENDED, sorted({*self._queued}))
            repairs.append(f"queue.ended: {len(removed)} rows removed from the queue")
        if ORPHAN.name in counts:
            deleted = await self._results.sweep_orphans(execution_id=self._execution_id)
            repairs.append(f"{ORPHAN.name}: {deleted} objects deleted")

    async def _pages(self) -> AsyncIterator[list[int]]:
        if self._execution_id is not None:
            yield [self._execution_id]
            return
        after = -1
        while rows := await self._pool.fetch(_PAGE_OF_EXECUTIONS, after, PAGE):
            yield [row["execution_id"] for row in rows]
            after = rows[-1]["execution_id"]

    async def _page(self, execution_ids: Sequence[int]) -> tuple[Findings, list[int]]:
        findings, different = Findings(), list[int]()
        try:
            async with _snapshot(self._pool) as connection:
                findings = await broken_rules(connection, execution_ids)
                different = await differing(connection, execution_ids)
        except (asyncpg.DataError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if len(execution_ids) == 1:
                findings.add(Finding(UNREADABLE.name, execution_ids[0], place=f"{type(error).__name__}: {error}"))
                return findings, different
            findings = Findings()
            for one in execution_ids:  # the others are checked completely
                own, differs = await self._page([one])
                findings.merge(own)
                different += differs
        return findings, different


@asynccontextmanager
async def _snapshot(pool: asyncpg.Pool) -> AsyncIterator[Any]:
    """Opens a transaction that reads one state of the log."""
    async with pool.acquire() as connection, connection.transaction(isolation="repeatable_read", readonly=True):
        yield connection


def _shown(finding: Finding) -> str:
    parts = [str(finding.execution_id or ""), finding.step or "", finding.place]
    if finding.iteration is not None:
        parts.insert(2, f"item {finding.iteration}")
    return " ".join(filter(None, parts))


# The visits whose results consist of missing ones: themselves, or as parts; and the events that refer to them.
_VISITS = """
WITH RECURSIVE affected AS (
    SELECT unnest($2::bigint[]) AS ref_id, unnest($2::bigint[]) AS missing
    UNION
    SELECT manifest_id, missing FROM affected
    JOIN noetl.manifest_part ON part_ref_id = affected.ref_id
    JOIN noetl.result_ref whole ON whole.ref_id = manifest_id AND whole.execution_id = $1
)
SELECT node_name AS step, (meta ->> 'visit')::int AS visit, bool_or(event_type = 'call.partial') AS chunks,
       array_agg(DISTINCT ref_id) || array_agg(DISTINCT missing) AS refs
FROM noetl.event JOIN affected ON ref_id = (result #>> '{reference,ref_id}')::bigint
WHERE execution_id = $1 AND event_type IN (
    'command.completed', 'loop.shard.done', 'retry_sequence_completed', 'call.partial', 'step.exit') AND meta ? 'visit'
GROUP BY 1, 2 ORDER BY 1, 2
"""
_FORGET_RESULTS = "DELETE FROM noetl.result_ref WHERE execution_id = $1 AND ref_id = ANY($2::bigint[])"

_TARGETS: Any = {"routing": {"arcs": {"__all__": {"step"}}}}
"""An arc names a step, and does not need its result."""


@dataclass(slots=True)
class Forgotten:
    """The outcome of forgetting.

    Attributes:
        executions: those to resume.
        results: references that were deleted.
        obstacles: why other missing results are not made again, a line for each step.
    """

    executions: list[int] = field(default_factory=list)
    results: int = 0
    obstacles: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.executions)) or "none"
        return "; ".join([f"{self.results} missing results forgotten; executions to resume: {shown}", *self.obstacles])


async def forget_missing(runtime: Runtime, missing: Mapping[int, Sequence[int]]) -> Forgotten:
    """Forgets missing results that can be made again and that their executions still need.

    Args:
        missing: ids of the references, by execution.
    """
    forgotten = Forgotten()
    for execution_id, ref_ids in missing.items():
        try:
            execution = await runtime.load(execution_id)
        except NoetlError as error:
            forgotten.obstacles.append(str(error))
            continue
        await _forget(runtime, execution, ref_ids, forgotten)
    return forgotten


async def _forget(runtime: Runtime, execution: Execution, ref_ids: Sequence[int], forgotten: Forgotten) -> None:
    state, lost, refs = execution.state, [], set[int]()
    if not state.is_running and state.status is not ExecutionStatus.FAILED:
        forgotten.obstacles.append(f"execution {execution.id} is {state.status} and cannot be resumed")
        return
    visits = await runtime.pool.fetch(_VISITS, execution.id, ref_ids)
    needed = _needed(execution, {row["step"] for row in visits})
    for row in visits:
        step, visit = row["step"], row["visit"]
        why = _obstacle(execution, step, visit, chunks=row["chunks"])
        if why is None and step not in needed:
            why = "no step that is still to run names its result"
        if why is not None:
            forgotten.obstacles.append(
                f"execution {execution.id}: the missing results of {step} are not made again: {why}"
            )
            continue
        lost.append([step, visit])
        refs.update(row["refs"])
    if not lost:
        return
    names = ", ".join(sorted({step for step, _ in lost}))
    meta = {"epoch": state.epoch, "lost": lost}
    event = runtime.event(state, EventType.WARNING, state.playbook, "playbook", "WARNING", meta)
    event.error = f"results of {names} are missing in the stores; when the execution is resumed, they are made again"
    async with runtime.pool.acquire() as connection, connection.transaction():
        await runtime.log.append([event], connection=connection)
        await connection.execute(_FORGET_RESULTS, execution.id, sorted(refs))
    forgotten.executions.append(execution.id)
    forgotten.results += len(refs & {*ref_ids})


def _obstacle(execution: Execution, step: str, visit: int, *, chunks: bool) -> str | None:
    """Returns why the commands of a visit cannot run again, or None."""
    program = execution.program.step(step)
    loop = program.step.loop
    if program.sink is not None:
        return "its sink has written them"
    if program.step.state is not None:
        return "its watermark has moved past them"
    if chunks:
        return "they are chunks of a stream"
    if loop is not None and (loop.mode is LoopMode.STREAM or loop.cursor is not None):
        return "its loop takes each item once"
    if any(entry.rule.continues_success for task in program.tasks for entry in task.continuations):
        return "they are pages that follow each other"
    if visit < execution.state.visits.get(step, visit):
        return "a later visit has replaced them"
    return None


def _needed(execution: Execution, lost: Iterable[str]) -> set[str]:
    """Returns which of the steps with lost results are named by steps that have not ended, or that run again."""
    playbook, state = execution.playbook, execution.state
    texts = {step.name: step.model_dump_json(exclude=_TARGETS) for step in playbook.steps}
    completed = (end for end in state.latest.values() if end.status is StepStatus.COMPLETED)
    ended = {end.step for end in completed if (end.step, state.visits.get(end.step)) not in state.entered}
    cyclic = {name for region in execution.program.graph.regions if region.is_cycle for name in region.steps}
    open_steps = texts.keys() - (ended - cyclic)
    needed: set[str] = set()
    while more := {
        step
        for step in {*lost} - needed
        if step in open_steps
        or any(re.search(rf"\b{re.escape(step)}\b", texts[name]) for name in open_steps | needed if name != step)
    }:
        needed |= more
    return needed
