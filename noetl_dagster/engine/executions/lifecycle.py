"""Starts, ends, resumes and cancels executions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from noetl_dagster.engine.interruptions import CHANNEL, NOTIFY
from noetl_dagster.engine.liveness import Liveness
from noetl_dagster.engine.loops.frames import EXPIRE, release_expired
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.engine.steps.checks import publish_parts
from noetl_dagster.engine.steps.regions import TokenQueue, streams_are_over
from noetl_dagster.engine.steps.watermarks import lost_race
from noetl_dagster.errors import ExecutionStateError, LostEventsError, NoetlError, WorkloadError
from noetl_dagster.events.connection import DATABASE_ERRORS, PATIENCE
from noetl_dagster.events.envelopes import to_result
from noetl_dagster.events.log import as_event
from noetl_dagster.events.queries import CLOSE_GATE, HAS_SINK_PARTS, RUNNING_CHILDREN, UNENDED
from noetl_dagster.events.state import ExecutionState, ExecutionStatus, StepEnd
from noetl_dagster.events.transport.queries import WITHDRAW_ALL
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.playbook.assets import Partition
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.workload import check_types, unknown_keys
from noetl_dagster.process.retrying import with_retries
from noetl_dagster.values import RefusedValueError, admit
from noetl_dagster.worker.command import Command
from noetl_dagster.worker.execution import Execution
from noetl_dagster.worker.running import remove_orphans
from noetl_dagster.worker.spans import commands_cancelled, execution_ended

T = TypeVar("T")

logger = logging.getLogger(__name__)

GIVE_BACK_SECONDS = 30.0
"""Time limit of the release of a cancelled cursor loop's rows; their table may be locked."""

_WORKFLOW_ENDS = {
    EventType.PLAYBOOK_COMPLETED: EventType.WORKFLOW_COMPLETED,
    EventType.PLAYBOOK_FAILED: EventType.WORKFLOW_FAILED,
}


class _Decision(NamedTuple, Generic[T]):
    """What a process has decided about an execution, and the event that records it; None if nothing is recorded."""

    outcome: T
    event: Event | None = None


class _Cancelled(NamedTuple):
    """An execution before it was cancelled, the event, and the claims of the commands that ended with it."""

    state: ExecutionState
    end: Event
    unended: list[Event]


def admitted_workload(workload: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a workload in its stored form.

    Raises:
        WorkloadError: a value of it has no such form.
    """
    try:
        return dict(admit(workload, "workload"))
    except RefusedValueError as error:
        raise WorkloadError(str(error)) from None


class Lifecycle:
    """Creates executions and ends each epoch of them once."""

    def __init__(self, runtime: Runtime, liveness: Liveness) -> None:
        self._runtime = runtime
        self._liveness = liveness

    async def create(
        self,
        playbook: Playbook,
        workload: dict[str, Any] | None = None,
        *,
        execution_id: int | None = None,
        parent: tuple[int, str] | None = None,
        origin: dict[str, Any] | None = None,
        partition: Partition | None = None,
    ) -> Execution:
        """Starts an execution: stores the playbook's text and writes ``playbook.initialized``.

        Args:
            workload: values that override the playbook's own.
            execution_id: an id given by the caller. A second call with it finds the first execution.
            parent: id and step of the execution that started this one.
            origin: the cause of the start, for display (Dagster run id, command line, ...).
            partition: of a partitioned playbook, the one that it belongs to; its keys go to the workload.

        Raises:
            PlaybookError: a setting that is a template of the workload comes to something it cannot be.
            WorkloadError: a value of the workload has no stored form, or does not have the type of its default.
        """
        runtime = self._runtime
        new_id = execution_id or runtime.ids.next()
        metadata = playbook.metadata
        overrides = admitted_workload(workload or {})
        check_types(playbook.workload, overrides)
        effective = {**playbook.workload, **overrides}
        if partition is not None:
            effective |= partition.workload(playbook.dagster.partitions)
        effective = admitted_workload(effective)
        if playbook.settled:
            # in a thread, since its templates may take seconds
            options: Any = {"file": playbook.file, "lenient": playbook.lenient, "workload": effective}
            await asyncio.to_thread(parse_playbook, playbook.source, **options)
        catalog_id = await runtime.log.put_source(
            metadata.path, metadata.version, playbook.source, model=playbook.stored, lenient=playbook.lenient
        )
        state = ExecutionState(new_id, playbook.name, catalog_id, parent[0] if parent else None, epoch=1)
        started = self._event(state, EventType.PLAYBOOK_INITIALIZED, "RUNNING")
        started.meta |= origin or {}
        if parent is not None:
            started.meta["parent_step"] = parent[1]
        started.context = {"workload": effective, "path": metadata.path, "file": playbook.file}
        if partition is not None:
            started.context["partition"] = partition.model_dump(mode="json", exclude_none=True)
        if playbook.renamed:
            started.context["renamed"] = playbook.renamed
        if playbook.lenient:
            started.context["lenient"] = True
        entry = self._event(state, EventType.WORKFLOW_INITIALIZED, "RUNNING")
        entry.meta["entry"] = playbook.entry.name
        texts = [*playbook.main_warnings, *unknown_keys(playbook.workload, overrides)]
        warnings = [self._event(state, EventType.WARNING, "WARNING", text) for text in texts]
        await runtime.log.append_with_first([started, entry, *warnings])
        return await runtime.load(new_id)

    async def load_resumable(self, execution_id: int) -> Execution:
        """Returns an execution that another process may resume.

        Raises:
            ExecutionNotFoundError: there is no such execution.
            ExecutionStateError: it is completed or cancelled, or a process drives it.
        """
        execution = await self._load_unfinished(execution_id)
        if await self._liveness.is_driven(execution_id):
            raise ExecutionStateError(
                f"a process drives execution {execution_id} now; wait for it, or cancel the execution"
            )
        return execution

    async def _load_unfinished(self, execution_id: int) -> Execution:
        execution = await self._runtime.load(execution_id)
        if execution.state.status in (ExecutionStatus.COMPLETED, ExecutionStatus.CANCELLED):
            raise ExecutionStateError(f"execution {execution_id} is {execution.state.status}; start a new one")
        return execution

    async def resume(
        self, execution_id: int, *, origin: dict[str, Any] | None = None, after: int | None = None
    ) -> Execution:
        """Opens a new epoch of an execution that stopped or failed.

        Args:
            after: the epoch that the caller found and decided to follow; by default the latest.

        Raises:
            ExecutionNotFoundError: there is no such execution.
            ExecutionStateError: it is completed or cancelled, or another process resumed it just now.
        """
        execution = await self._load_unfinished(execution_id)
        state = execution.state
        if after is not None and state.epoch != after:
            raise ExecutionStateError(f"execution {execution_id} was resumed by another process just now")

        async def begin(connection: Any, now: ExecutionState) -> _Decision[Event]:
            if now.status in (ExecutionStatus.COMPLETED, ExecutionStatus.CANCELLED):
                raise ExecutionStateError(
                    f"execution {execution_id} was {now.status.lower()} by another process just now"
                )
            event = self._event(state, EventType.EXECUTION_RESUMED, "RUNNING")
            event.meta = {"epoch": state.epoch + 1, **(origin or {})}
            if not await self._runtime.log.append_once(event, connection=connection):
                raise ExecutionStateError(f"execution {execution_id} was resumed by another process just now")
            await connection.execute(NOTIFY, CHANNEL, str(execution_id))
            return _Decision(event, event)

        state.apply(await self._decide(execution_id, begin))
        return execution

    async def finish_if_over(self, execution: Execution) -> ExecutionStatus:
        """Ends the epoch when no token is left: every step that was reached has ended.

        The process that ends the last step calls this; a unique index lets one of several callers write the end.

        Raises:
            LostEventsError: the log lacks ends of steps that this process knows.
        """
        state = execution.state
        if not state.is_running:
            return state.status
        waiting, failures = outstanding(execution)
        if waiting:
            return state.status
        if self._liveness.was_interrupted(execution.id):
            await self._check_ends(execution)
        if failures:
            return await self.fail(execution, failures[0].failure)
        await self._warn_of_lost_races(execution)
        last = max(state.latest.values(), key=lambda end: end.event_id, default=None)
        done = self._event(state, EventType.PLAYBOOK_COMPLETED, "COMPLETED")
        if last is not None:
            done.result = to_result(last.envelope)
            done.meta["last_step"] = last.step
        return await self._stop(execution, done)

    async def _check_ends(self, execution: Execution) -> None:
        """Compares the ends of steps with the log, after the database may have failed over to a standby."""
        recorded = (await self._runtime.load(execution.id)).state
        lost = sorted({step for step, _ in execution.state.ends.keys() - recorded.ends.keys()})
        if lost:
            raise LostEventsError(
                f"execution {execution.id}: the event log has no end of {', '.join(lost)}, although they are done: it "
                f"has lost events, as after a failover to an asynchronous standby; 'noetl-dagster resume "
                f"{execution.id}' runs them again"
            )

    async def _warn_of_lost_races(self, execution: Execution) -> None:
        """Warns of watermarks that move with the end of this execution, and that another one has moved meanwhile."""
        for end in execution.state.ends.values():
            if end.watermark is not None and end.watermark.get("pending"):
                visit = execution.visit(end.step, end.visit)
                if warning := await lost_race(self._runtime, visit, end.watermark):
                    event = self._event(execution.state, EventType.WARNING, "WARNING", warning)
                    await self._runtime.buffer.append([event])

    async def fail(self, execution: Execution, message: str) -> ExecutionStatus:
        """Ends the epoch with a failure."""
        event = self._event(execution.state, EventType.PLAYBOOK_FAILED, "FAILED", message)
        return await self._stop(execution, event)

    async def fail_unstarted(self, execution_id: int, message: str) -> bool:
        """Fails an execution whose run ended before its first step; returns False if the run had begun."""
        execution = await self._runtime.load(execution_id)
        unstarted = execution.state.is_running and execution.state.run_id is None
        if unstarted:
            await self.fail(execution, message)
        return unstarted

    async def cancel(self, execution_id: int, reason: str = "cancelled on request") -> bool:
        """Cancels an execution for good. False when it had ended already.

        From the commit on no command of it is issued, queued or claimed. Commands that were claimed, by workers of the
        pool or by a process that drives the execution, end as failed with it; their processes are notified.
        """
        cancelled = await self._cancel_tree(execution_id, reason)
        for cancelled_id, ends in cancelled.items():
            await self._give_back(cancelled_id)
            await self._publish(cancelled_id)
            await self._tell_trace(cancelled_id, ends)
        if cancelled:
            await remove_orphans(self._runtime.pool, cancelled)
        return execution_id in cancelled

    async def _cancel_tree(self, execution_id: int, reason: str) -> dict[int, _Cancelled]:
        """Cancels an execution and those that it started; returns those that had not ended."""
        own_end = await self._decide(execution_id, partial(self._cancel, execution_id, reason))
        cancelled = {} if own_end is None else {execution_id: own_end}
        for child in await self._runtime.pool.fetch(RUNNING_CHILDREN, execution_id):
            cancelled |= await self._cancel_tree(child["execution_id"], f"its parent {execution_id}: {reason}")
        return cancelled

    async def _cancel(
        self, execution_id: int, reason: str, connection: Any, state: ExecutionState
    ) -> _Decision[_Cancelled | None]:
        if not state.is_running:
            return _Decision(None)
        event = self._event(state, EventType.EXECUTION_CANCELLED, "CANCELLED", reason)
        if not await self._runtime.log.append_once(event, connection=connection):
            return _Decision(None)  # it completed or failed just now
        await connection.execute(WITHDRAW_ALL, execution_id)  # first: claims pass over what is locked
        unended = [as_event(record) for record in await connection.fetch(UNENDED, execution_id)]
        ends = []
        for begun in unended:  # their workers will send no ends
            ends.append(self._runtime.commands.cancelled(Command.of(begun), reason))
            ends[-1].worker_id = begun.worker_id
        await self._runtime.log.append(ends, connection=connection)
        await connection.execute(EXPIRE, execution_id)
        await connection.execute(NOTIFY, CHANNEL, str(execution_id))
        return _Decision(_Cancelled(state, event, unended), event)

    async def _tell_trace(self, execution_id: int, cancelled: _Cancelled) -> None:
        """Records the spans of commands that ended with an execution; the processes that ran them do not."""
        if cancelled.state.catalog_id is None:
            return
        try:
            trace = (await self._runtime.assemble(cancelled.state)).trace
        except (NoetlError, *DATABASE_ERRORS) as error:
            logger.warning("execution %s: its trace has no end: %s", execution_id, error)
            return
        if trace is not None:
            state, end = cancelled.state, cancelled.end
            commands_cancelled(trace, state, cancelled.unended, end.error or "")
            execution_ended(trace, state, end)

    async def _give_back(self, execution_id: int) -> None:
        """Releases the rows that its cursor loops have claimed; the reaper retries those that it cannot release."""
        try:
            async with asyncio.timeout(GIVE_BACK_SECONDS):
                await release_expired(self._runtime, execution_id)
        except (NoetlError, *DATABASE_ERRORS) as error:
            logger.warning("execution %s: %s; the reaper tries again", execution_id, str(error) or "it took too long")

    async def _publish(self, execution_id: int) -> None:
        """Publishes the completed sink parts of steps that will not end any more."""
        try:
            if not await self._runtime.pool.fetchval(HAS_SINK_PARTS, execution_id):
                return
            execution = await self._runtime.load(execution_id)
        except (NoetlError, *DATABASE_ERRORS) as error:
            logger.warning("execution %s: its sinks are left as they are: %s", execution_id, error)
            return
        for step, visit in execution.state.visits.items():
            if execution.state.end_of(step, visit) is None:
                try:
                    await publish_parts(self._runtime, execution.visit(step, visit))
                except (NoetlError, *DATABASE_ERRORS) as error:
                    logger.warning("execution %s: step %s: %s", execution_id, step, error)

    async def _decide(self, execution_id: int, decision: Callable[[Any, ExecutionState], Awaitable[_Decision[T]]]) -> T:
        """Decides with a connection and the state, while no other process adds commands or epochs.

        A decision is made again if the database goes away, or if it deadlocks with the ends of commands. One that was
        committed stands, although its answer was lost: its event is in the log.
        """
        made: _Decision[T] | None = None

        async def attempt() -> T:
            nonlocal made
            log = self._runtime.log
            async with log.pool.acquire() as connection, connection.transaction():
                await connection.execute(CLOSE_GATE, execution_id)
                if made is None or made.event is None or not await log.present([made.event], connection=connection):
                    made = None
                    made = await decision(connection, await self._runtime.state(execution_id, connection))
                return made.outcome

        return await with_retries(attempt, PATIENCE)

    async def _stop(self, execution: Execution, event: Event) -> ExecutionStatus:
        """Ends the epoch with ``event``, unless another process ended it before, or began the next one."""
        state = execution.state
        type_ = _WORKFLOW_ENDS[EventType(event.event_type)]
        workflow = self._event(state, type_, event.status or "", event.error)

        async def end(connection: Any, now: ExecutionState) -> _Decision[ExecutionState | None]:
            is_latest = now.epoch == state.epoch
            if is_latest and await self._runtime.log.append_with_first([event, workflow], connection=connection):
                return _Decision(None, event)
            return _Decision(now)

        other = await self._decide(state.execution_id, end)
        if other is None:
            if execution.trace is not None:
                execution_ended(execution.trace, state, event)
            state.apply(event)
        else:
            state.status, state.error = other.status, other.error
        return state.status

    def _event(self, state: ExecutionState, type_: EventType, status: str, error: str | None = None) -> Event:
        meta = {"epoch": state.epoch}
        event = self._runtime.event(state, type_, state.playbook, "playbook", status, meta)
        event.error = error
        return event


def outstanding(execution: Execution) -> tuple[set[str], list[StepEnd]]:
    """Returns the regions that were reached and have not ended, and the unhandled failures.

    A step after an unhandled failure is not waited for, since its join never has all its upstreams.
    """
    graph, state = execution.program.graph, execution.state
    reached = {graph.region_of[execution.playbook.entry.name].name}
    failures = []
    for end in state.ends.values():
        standing = state.end_of(end.step, end.visit)
        if standing is None:
            continue
        if standing.unhandled:
            failures.append(standing)
        reached.update(graph.region_of[target].name for target in standing.fired)
    # a cycle stops at its failure, whatever tokens still wait in it; regions after it, at any distance, never start
    stopped = [graph.region_of[end.step] for end in failures]
    blocked = {region.name for region in stopped}
    while stopped:
        for target in stopped.pop().targets:
            region = graph.region_of[target]
            if region.name not in blocked:
                blocked.add(region.name)
                stopped.append(region)
    waiting = {name for name in reached - blocked if not _is_over(execution, name)}
    return waiting, failures


def _is_over(execution: Execution, region_name: str) -> bool:
    region = execution.program.graph.by_name[region_name]
    if region.is_stream:
        return streams_are_over(execution, region)
    if not region.is_cycle:
        return execution.state.end_of(region.steps[0], 1) is not None
    return not TokenQueue.replay(execution, region).waiting
