"""Reports the assets and checks of executions that no Dagster run drives, as events without a run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dagster import (
    AssetCheckEvaluation,
    AssetCheckKey,
    AssetKey,
    AssetMaterialization,
    AssetRecordsFilter,
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    EventLogEntry,
    MultiPartitionKey,
)

# private: events that are stored in batches; DagsterInstance.report_runless_asset_event stores one at a time
from dagster._core.events import StepMaterializationData

from noetl_dagster.compiler.external_assets import DATA_VERSION
from noetl_dagster.compiler.lineage.tables import FolderWriters
from noetl_dagster.compiler.partitions import stored_partition
from noetl_dagster.compiler.plan import PlaybookPlan, StepPlan, plan_playbook
from noetl_dagster.compiler.result_metadata import check_facts, step_metadata
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.results import references_of
from noetl_dagster.events.ids import snowflake_milliseconds
from noetl_dagster.events.state import StepEnd, StepStatus
from noetl_dagster.events.types import Event, EventType
from noetl_dagster.io_managers.metadata import LINEAGE, STORAGE_KIND, redacted, with_origins
from noetl_dagster.io_managers.results import metadata_of
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import Settings
from noetl_dagster.worker.execution import Execution

logger = logging.getLogger(__name__)

CHECKED_END = "event"
"""Metadata of an evaluation: the id of the event that ended the checked step."""

_NO_RUN = ""
"""Id of the run, and name of the job, of events without a run."""

SLACK_SECONDS = 60.0
"""The clocks of two machines differ by less."""

PAGE = 500

_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('noetl.dagster_report', 0))"
_REPORTED = """
SELECT execution_id, max((meta ->> 'epoch')::int) AS epoch, max((meta ->> 'through')::bigint) AS through
FROM noetl.event WHERE execution_id = ANY($1) AND event_type = 'execution.reported'
GROUP BY execution_id
"""


@dataclass(slots=True)
class _Ended:
    """A step of an execution that ended, with the reference of its result if it completed."""

    execution: Execution
    plan: PlaybookPlan
    step: StepPlan
    end: StepEnd
    reference: ResultRef | None = None


class DagsterReporter:
    """Reports executions that have ended. The log records which epochs are reported.

    One process of all reports at a time. The record is written after Dagster's, in the transaction that holds the lock.
    If the process is killed between the two, the next report finds the events in Dagster and adds only the record.

    Dagster's storage has no key that refuses an event that it has. A report whose connections to the log all break
    while it writes to Dagster can therefore be repeated: a second process may look for its events before they arrive.
    """

    def __init__(self, engine: Engine, instance: DagsterInstance) -> None:
        self._engine = engine
        self._instance = instance
        self._plans: dict[tuple[int | None, frozenset[tuple[str, str]], bool], PlaybookPlan] = {}

    async def report(self, executions: Sequence[Execution], *, fresh: bool = False) -> int:
        """Reports what is not reported yet, and returns the number of materializations.

        Args:
            fresh: this process drives the executions. If it has done so without interruption, no other process has
                begun to report them, and Dagster is not searched for their events.
        """
        runtime = self._engine.runtime
        by_id = {one.id: one for one in executions if not one.state.is_running}
        steps = await self._steps(by_id.values())
        async with runtime.pool.acquire() as connection, connection.transaction():
            await connection.execute(_LOCK)
            rows = await connection.fetch(_REPORTED, list(by_id))
            before = {row["execution_id"]: (row["epoch"], row["through"]) for row in rows}
            due = [one for one in by_id.values() if before.get(one.id, (0, 0))[0] < one.state.epoch]
            through = {one.id: before.get(one.id, (0, 0))[1] for one in due}
            ended = [
                step
                for step in steps
                if step.execution.id in through and step.end.event_id > through[step.execution.id]
            ]
            fresh = fresh and await self._engine.liveness.has_held(by_id)
            made = await asyncio.to_thread(self._write, due, ended, fresh=fresh)
            await runtime.log.append([self._record(one) for one in due], connection=connection)
        return made

    async def _steps(self, executions: Iterable[Execution]) -> list[_Ended]:
        """Returns the ends of the steps that are assets. A step that ran several times has its latest."""
        ended_steps = []
        for execution in executions:
            plan = self._plans.get(_key(execution))
            if plan is None:
                plan = await asyncio.to_thread(self._plan, execution)
            for one in plan.assets:
                end = execution.state.latest.get(one.step.name)
                if end is not None:
                    ended_steps.append(_Ended(execution, plan, one, end))
        completed = [one for one in ended_steps if one.end.status is StepStatus.COMPLETED]
        ends = [(one.execution.id, one.end) for one in completed]
        for ended, reference in zip(completed, await references_of(self._engine.runtime, ends), strict=True):
            ended.reference = reference
        return ended_steps

    def _plan(self, execution: Execution) -> PlaybookPlan:
        playbook = execution.playbook
        folder = self._engine.runtime.settings.playbooks_path
        plan = plan_playbook(playbook, writers=FolderWriters(folder, playbook))
        if not playbook.settled:
            self._plans[_key(execution)] = plan
        return plan

    def _record(self, execution: Execution) -> Event:
        state = execution.state
        meta = {
            "epoch": state.epoch,
            "through": max((end.event_id for end in state.ends.values()), default=0),
        }
        return self._engine.runtime.event(
            state, EventType.EXECUTION_REPORTED, state.playbook, "playbook", str(state.status), meta
        )

    def _write(self, executions: Iterable[Execution], ended: Sequence[_Ended], *, fresh: bool) -> int:
        """Writes to Dagster's log: the materializations of an asset together, then the evaluations."""
        for one in {step.execution.id: step for step in ended}.values():
            partition = stored_partition(one.execution.state.partition)
            if partition is not None:
                one.plan.partitions.register(partition, self._instance)
        settings = self._engine.runtime.settings
        by_asset: dict[AssetKey, list[AssetMaterialization]] = {}
        for step in ended:
            if step.reference is not None:
                by_asset.setdefault(step.step.key, []).append(_materialization(settings, step, step.reference))
        checks = [
            AssetCheckEvaluation(**facts)
            for one in ended
            for facts in check_facts(settings, one.step, one.end, one.execution, {CHECKED_END: str(one.end.event_id)})
        ]
        if not fresh and ended:
            since = min(snowflake_milliseconds(step.end.event_id) for step in ended) / 1000 - SLACK_SECONDS
            by_asset = {key: self._unknown(key, made, since) for key, made in by_asset.items()}
            checks = [check for check in checks if not self._is_known(check)]
        storage = self._instance.event_log_storage
        for made in by_asset.values():
            if made:
                storage.store_event_batch([_entry(one) for one in made])
        for check in checks:
            self._instance.report_runless_asset_event(check)
        return sum(map(len, by_asset.values()))

    def _unknown(self, key: AssetKey, made: Sequence[AssetMaterialization], since: float) -> list[AssetMaterialization]:
        """Returns the materializations that Dagster does not have."""
        wanted = {_version(one) for one in made}
        reported_versions: set[str | None] = set()
        newest: tuple[EventLogEntry, int] | None = None
        cursor, more = None, True
        while more and not wanted <= reported_versions:
            filters = AssetRecordsFilter(key, after_timestamp=since)
            page = self._instance.fetch_materializations(filters, limit=PAGE, cursor=cursor)
            for record in page.records:
                if record.asset_materialization is not None:
                    newest = newest or (record.event_log_entry, record.storage_id)
                    reported_versions.add(_version(record.asset_materialization))
            cursor, more = page.cursor, page.has_more
        if newest is not None and wanted & reported_versions:
            self._show_latest(key, *newest)
        return [one for one in made if _version(one) not in reported_versions]

    def _show_latest(self, key: AssetKey, entry: EventLogEntry, storage_id: int) -> None:
        """Completes a report whose process was killed before Dagster's table of assets named its materialization."""
        records = self._instance.get_asset_records([key])
        shown = records[0].asset_entry.last_materialization_storage_id if records else None
        store = getattr(self._instance.event_log_storage, "store_asset_event", None)
        if store is not None and (shown is None or shown < storage_id):
            store(entry, storage_id)

    def _is_known(self, check: AssetCheckEvaluation) -> bool:
        """Reports whether Dagster has an evaluation."""
        key, cursor = AssetCheckKey(check.asset_key, check.check_name), None
        history = self._instance.event_log_storage.get_asset_check_execution_history
        since = snowflake_milliseconds(int(str(check.metadata[CHECKED_END].value))) / 1000 - SLACK_SECONDS
        while records := history(key, limit=PAGE, cursor=cursor):
            for record in records:
                event = record.event.dagster_event if record.event is not None else None
                if event is None or event.event_type is not DagsterEventType.ASSET_CHECK_EVALUATION:
                    continue
                if event.asset_check_evaluation_data.metadata.get(CHECKED_END) == check.metadata[CHECKED_END]:
                    return True
            if records[-1].create_timestamp < since:
                return False
            cursor = records[-1].id
        return False


def _key(execution: Execution) -> tuple[int | None, frozenset[tuple[str, str]], bool]:
    state = execution.state
    return state.catalog_id, frozenset(state.renamed.items()), state.lenient


def _version(made: AssetMaterialization) -> str | None:
    return (made.tags or {}).get(DATA_VERSION)


def _materialization(settings: Settings, ended: _Ended, reference: ResultRef) -> AssetMaterialization:
    """Returns the event that a run would record for the output of the step."""
    execution, end = ended.execution, ended.end
    partition = stored_partition(execution.state.partition)
    shown = redacted(step_metadata(settings, ended.plan, ended.step, end, execution, logger))
    stored = dict(metadata_of(reference, partitioned=partition is not None))
    if STORAGE_KIND in shown:  # of the table that the step has written
        stored.pop(STORAGE_KIND)
    key: str | None = None if partition is None else partition.key
    if partition is not None and len(partition.parts) > 1:
        key = MultiPartitionKey({name: part.key for name, part in partition.parts.items()})
    return AssetMaterialization(
        asset_key=ended.step.key,
        description=f"step {end.step} of execution {execution.id}, which has no run",
        metadata=shown | with_origins(stored, shown.get(LINEAGE)),
        partition=key,
        tags={DATA_VERSION: str(end.event_id)},
    )


def _entry(made: AssetMaterialization) -> EventLogEntry:
    """Returns the entry that ``report_runless_asset_event`` would store."""
    event = DagsterEvent(
        event_type_value=DagsterEventType.ASSET_MATERIALIZATION.value,
        event_specific_data=StepMaterializationData(made),
        job_name=_NO_RUN,
    )
    return EventLogEntry(
        user_message="",
        level=logging.INFO,
        job_name=_NO_RUN,
        run_id=_NO_RUN,
        error_info=None,
        timestamp=time.time(),
        step_key=None,
        dagster_event=event,
    )
