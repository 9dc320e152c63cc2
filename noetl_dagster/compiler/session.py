"""One op's work on the execution of its run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dagster import (
    AssetCheckResult,
    AssetCheckSeverity,
    AssetKey,
    Failure,
    MetadataValue,
    OpExecutionContext,
    Output,
    TableColumn,
    TableRecord,
    TableSchema,
)

from noetl_dagster.compiler.drive import drive
from noetl_dagster.compiler.executors.noetl import processes_of, runs_in_one_process
from noetl_dagster.compiler.external_assets import ExternalAssets
from noetl_dagster.compiler.partitions import PlaybookPartitions
from noetl_dagster.compiler.pipes import Pipes, receiving, take_messages
from noetl_dagster.compiler.plan import PlaybookPlan, RegionPlan, StepPlan
from noetl_dagster.compiler.result_metadata import lineage_metadata, rows_metadata
from noetl_dagster.compiler.runs import attach
from noetl_dagster.compiler.specs import relation_metadata
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.progress import loop_progress
from noetl_dagster.engine.executions.results import reference_of
from noetl_dagster.engine.executions.spark_ahead import prepare_spark
from noetl_dagster.events.state import CheckOutcome, ExecutionStatus, StepEnd, StepStatus
from noetl_dagster.io_managers.metadata import LINEAGE, with_origins
from noetl_dagster.playbook.assets import Severity
from noetl_dagster.playbook.graph import have_same_steps_and_arcs
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.process.log_context import LogContext
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.worker.execution import Execution

NOETL = "noetl"
PYSPARK = "pyspark"


@dataclass(frozen=True, slots=True)
class OpSession:
    """One op's work on the execution of its run.

    Attributes:
        plan: from which the op was made; the execution keeps the playbook's text with which it began.
        region: the op's steps.
    """

    context: OpExecutionContext
    engine: Engine
    execution: Execution
    plan: PlaybookPlan
    region: RegionPlan

    @property
    def is_changed(self) -> bool:
        """True if the file has changed since the execution began, so that its steps differ from those of the op."""
        return not have_same_steps_and_arcs(self.execution.playbook, self.plan.playbook)

    def walk(self) -> None:
        """Takes the execution to its end, with the steps that it began with; the ops of this run are not theirs.

        Raises:
            Failure: the execution failed.
        """
        entry = self.execution.playbook.entry.name
        self.context.log.warning(
            f"{self.plan.playbook.file} has other steps now than execution {self.execution.id} began with; "
            "it goes on with those"
        )
        if self.drive(self.engine.walker.run(self.execution), entry) == ExecutionStatus.FAILED:
            ends = self.execution.state.latest.values()
            raise Failure(
                "; ".join(f"step {end.step}: {end.error}" for end in ends if end.unhandled),
                allow_retries=False,
            )

    @classmethod
    def open(
        cls,
        context: OpExecutionContext,
        plan: PlaybookPlan,
        region: RegionPlan,
        workload: dict[str, Any] | None,
    ) -> OpSession:
        """Attaches to the execution of the op's run, or starts it.

        Args:
            workload: overrides from the run config; None for ops that cannot start an execution.
        """
        resource: EngineProvider = getattr(context.resources, NOETL)
        engine = resource.engine()
        engine.runtime.find_external = ExternalAssets(engine.runtime, context).find
        engine.runtime.partition_of = lambda playbook, values: PlaybookPartitions(playbook).choose(values)
        engine.runtime.box.pipes = Pipes(engine.runtime.box).open
        pyspark = getattr(context.resources, PYSPARK, None)
        if pyspark is not None:  # the run's own, with the configuration of this run
            engine.runtime.box.spark = lambda: pyspark.spark_session
        with LogContext(run_id=context.run_id):
            execution = run_sync(attach(engine, context.instance, context.run, plan, workload))
        processes = processes_of(context.run.run_config)
        if processes is not None:
            engine.helpers.set_processes(execution.id, processes)
        if runs_in_one_process(context):
            prepare_spark(engine.runtime, execution)
        return cls(context, engine, execution, plan, region)

    def drive(self, work: Any, step: str, stream: Sequence[str] = ()) -> Any:
        """Waits for a coroutine of the engine, as :func:`noetl_dagster.compiler.drive.drive` does."""
        work = self.engine.guard(self.execution, work)
        with (
            LogContext(execution_id=self.execution.id, step=step, run_id=self.context.run_id),
            receiving(self.execution.id, self.context, self._pipes_assets),
        ):
            return drive(
                self.context, self.engine, work, execution_id=self.execution.id, step=step, stream=stream
            )

    @property
    def _pipes_assets(self) -> dict[str, AssetKey | None]:
        """The assets of the op's steps whose jobs report over Pipes; None for steps that are no assets."""
        return {
            one.step.name: one.key if one.spec is not None else None
            for one in self.region.steps
            if any(task.config.get("pipes") for task in one.step.tasks)
        }

    def outputs(
        self, ends: list[StepEnd], arcs: list[str], metadata: dict[str, Any] | None = None
    ) -> Iterator[Any]:
        """Yields the results that there are, the outcomes of their checks, and a token for each arc that fired."""
        steps = {one.step.name: one for one in self.region.steps}
        for end in ends:
            one = steps[end.step]
            received = take_messages(self.execution.id, end.step)
            for event in received.events if received is not None else ():
                self.context.log_event(event)  # type: ignore[arg-type]
            if one.spec is None:
                continue
            if end.status is StepStatus.COMPLETED:
                reference = run_sync(reference_of(self.engine.runtime, self.execution.id, end))
                shown = self._metadata(one, end) | (metadata or {})
                shown |= received.metadata if received is not None else {}
                yield Output(reference, one.result, metadata=shown)
            declared = {check.name for check in one.checks}
            for outcome in self.execution.state.checks_of(end.step, end.visit):
                if outcome.name in declared:
                    yield self._check_result(one, outcome)
        for name in arcs:
            yield Output(None, name)

    def _check_result(self, one: StepPlan, outcome: CheckOutcome) -> AssetCheckResult:
        return AssetCheckResult(
            passed=outcome.passed,
            asset_key=one.key,
            check_name=outcome.name,
            severity=AssetCheckSeverity.WARN
            if outcome.severity == Severity.WARN
            else AssetCheckSeverity.ERROR,
            description=outcome.why or None,
            metadata={"execution": str(self.execution.id), **_facts(outcome.facts)},
        )

    def pace(self, step: str) -> dict[str, Any]:
        """Returns the seconds and the shards per second of the fan-out that has just ended, for its asset."""
        pool = self.engine.runtime.pool
        found = [one for one in run_sync(loop_progress(pool, self.execution.id)) if one.step == step]
        if not found:
            return {}
        return {"seconds": round(found[-1].seconds, 3), "shards a second": round(found[-1].rate, 1)}

    def finish(self, ends: list[StepEnd]) -> None:
        """Ends the execution if this was its last step, and fails the op if a failure has no arc.

        Raises:
            Failure: a step failed and no arc handles its failure.
        """
        status = run_sync(self._finish())
        if status != ExecutionStatus.RUNNING:
            self.context.log.info(f"execution {self.execution.id} is {status}")
        for end in ends:
            if end.unhandled:
                place = self.execution.playbook.step(end.step).place
                where = f" ({place})" if place is not None else ""
                raise Failure(
                    f"step {end.step}{where}: {end.error}",
                    metadata={"execution": str(self.execution.id), "error": str(end.envelope.get("error"))},
                    allow_retries=False,
                )

    async def _finish(self) -> str:
        fresh = await self.engine.runtime.load(self.execution.id)
        return await self.engine.lifecycle.finish_if_over(fresh)

    def _metadata(self, one: StepPlan, end: StepEnd) -> dict[str, Any]:
        state = self.execution.state
        metadata: dict[str, Any] = {
            "execution": str(self.execution.id),
            "visit": MetadataValue.int(end.visit),
        }
        for key in ("total", "done", "failed"):
            if isinstance(end.envelope.get(key), int):
                metadata[key] = MetadataValue.int(end.envelope[key])
        metadata |= _spark_metadata(end.envelope.get("spark"))
        metadata |= _watermark_metadata(state.watermarks.get((end.step, end.visit)), end)
        try:
            metadata |= rows_metadata(end.envelope, partitioned=state.partition is not None)
            metadata |= relation_metadata(self.plan.playbook, one.step, state.workload)
            metadata |= lineage_metadata(self.plan, one.step, end, state)
            metadata = with_origins(metadata, metadata.get(LINEAGE))
        except Exception as error:  # metadata is for people: the step has completed without it
            self.context.log.warning(f"step {end.step}: some metadata is missing: {error!r}")
        return metadata


def _watermark_metadata(kept: dict[str, Any] | None, end: StepEnd) -> dict[str, Any]:
    """Returns the step's watermark after a visit, and the one before."""
    if kept is None:
        return {}
    now = kept["value"] if end.watermark is None else end.watermark["value"]
    shown = {"watermark": now, "previous_watermark": kept["value"]}
    return {name: value for name, value in shown.items() if value is not None}


def _spark_metadata(metrics: Any) -> dict[str, Any]:
    """Returns the shuffle, spill and skew of a spark task, such as ``spark/shuffle_read_bytes``, as far as known."""
    if not isinstance(metrics, dict):
        return {}
    return {f"spark/{name}": value for name, value in metrics.items() if isinstance(value, int | float | str)}


def _facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts of a check as metadata: examples as a table."""
    found = dict(facts)
    rows = found.pop("examples", None)
    if rows:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = [TableRecord({name: _cell(row.get(name)) for name in columns}) for row in rows]
        found["examples"] = MetadataValue.table(
            table, schema=TableSchema([TableColumn(name, "string") for name in columns])
        )
    return found


def _cell(value: Any) -> str | int | float | bool | None:
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
