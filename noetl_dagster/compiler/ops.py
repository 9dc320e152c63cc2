"""Ops: the step function of the engine under Dagster's names for its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dagster import Any as AnyType
from dagster import (
    AssetCheckResult,
    AssetCheckSeverity,
    DynamicOut,
    DynamicOutput,
    Failure,
    In,
    MetadataValue,
    Nothing,
    OpDefinition,
    OpExecutionContext,
    Out,
    Output,
    TableColumn,
    TableRecord,
    TableSchema,
)

from noetl_dagster.about import About
from noetl_dagster.compiler.assets.elsewhere import Elsewhere
from noetl_dagster.compiler.assets.partitions import chosen_partition
from noetl_dagster.compiler.assets.reading import Reading
from noetl_dagster.compiler.attach import attach
from noetl_dagster.compiler.config import WORKLOAD
from noetl_dagster.compiler.drive import drive
from noetl_dagster.compiler.executor import processes_of, runs_in_one_process
from noetl_dagster.compiler.names import FANIN_SUFFIX, GROUP_SUFFIX, asset_key, dagster_name
from noetl_dagster.compiler.tokens import TOKENS
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.ahead import prepare_spark, uses_spark
from noetl_dagster.engine.executions.progress import loop_progress
from noetl_dagster.engine.executions.results import reference_of
from noetl_dagster.engine.fanout.shards import GroupReport
from noetl_dagster.engine.steps.region import run_region
from noetl_dagster.event_loop import run_sync
from noetl_dagster.events.state import CheckOutcome, ExecutionStatus, StepEnd, StepStatus
from noetl_dagster.playbook.assets import Severity
from noetl_dagster.playbook.graph import Region
from noetl_dagster.playbook.models import Playbook, Step
from noetl_dagster.resources.noetl import NoetlResource
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.worker.execution import Execution

NOETL = "noetl"
PYSPARK = "pyspark"
RESULTS_IO = "noetl_results"
DEFAULT_IO = "io_manager"
"""Dagster's own, which the config of every graph's outputs asks for, and which a graph of one step would not have."""
TOKENS_IN = "tokens"
RESULT = "result"
GROUPS = "groups"
EXPANDED = "expanded"


def arc_output(target: str) -> str:
    """Name of the output that stands for the arcs to a step."""
    return f"to_{target}"


def check_output(step: str, check: str) -> str:
    """Name of the output that stands for a check of a step."""
    return f"check__{step}__{check}"


@dataclass(frozen=True, slots=True)
class OpMaker:
    """Makes the ops of one playbook.

    Attributes:
        names: name of each region's op in the graph, by region name.
        steps: op-safe name of each step.
        entry: region in which the execution starts.
        prefix: what makes the ops' own names different from those of other playbooks.
        readings: assets outside of the playbook that its steps read.
    """

    playbook: Playbook
    names: dict[str, str]
    steps: dict[str, str]
    entry: str
    prefix: str
    readings: tuple[Reading, ...] = ()

    def step_ops(self, region: Region) -> list[OpDefinition]:
        """The ops of a region: one, or the three of a fan-out."""
        if region.is_cycle:
            return [self._region_op(region)]
        step = self.playbook.step(region.steps[0])
        if step.is_fanout:
            return [self._expand_op(region, step), self._group_op(region, step), self._fanin_op(region, step)]
        return [self._step_op(region, step)]

    def _step_op(self, region: Region, step: Step) -> OpDefinition:
        def run(context: OpExecutionContext, inputs: dict[str, Any]) -> Iterator[Output[Any]]:
            session = self._session(context, region)
            end = session.drive(session.engine.steps.run(session.execution, step.name), step.name)
            yield from session.outputs([end], {step.name: RESULT}, self._arc_names(end.fired))
            session.finish([end])

        return self._op(region, self.names[region.name], run, self._outs(region, [step.name]), step)

    def _region_op(self, region: Region) -> OpDefinition:
        def run(context: OpExecutionContext, inputs: dict[str, Any]) -> Iterator[Output[Any]]:
            session = self._session(context, region)
            work = run_region(session.engine.steps, session.execution, region)
            fired, failure = session.drive(work, region.steps[0])
            latest = session.execution.state.latest
            ends = [latest[name] for name in region.steps if name in latest]
            results = {name: f"{RESULT}_{self.steps[name]}" for name in region.steps}
            yield from session.outputs(ends, results, self._arc_names(fired))
            session.finish([failure] if failure is not None else [])

        outs = {
            f"{RESULT}_{self.steps[name]}": _result_out(self.playbook.step(name))
            for name in region.steps
            if self.playbook.step(name).is_asset
        }
        outs |= self._check_outs(region) | self._arc_outs(region)
        return self._op(region, self.names[region.name], run, outs)

    def _expand_op(self, region: Region, step: Step) -> OpDefinition:
        def run(
            context: OpExecutionContext, inputs: dict[str, Any]
        ) -> Iterator[Output[Any] | DynamicOutput[Any]]:
            session = self._session(context, region)
            work = session.engine.fanouts.expand(session.execution, step.name)
            expanded = session.drive(work, step.name)
            context.log.info(f"{step.name}: {expanded.total} shards in {len(expanded.groups)} groups")
            for group in expanded.groups:
                yield DynamicOutput(group, mapping_key=group.key, output_name=GROUPS)
            yield Output(None, EXPANDED, metadata={"shards": expanded.total, "groups": len(expanded.groups)})

        outs: dict[str, Any] = {
            GROUPS: DynamicOut(AnyType, io_manager_key=TOKENS),
            EXPANDED: Out(Nothing),
        }
        return self._op(region, self.names[region.name], run, outs, step)

    def _group_op(self, region: Region, step: Step) -> OpDefinition:
        def run(context: OpExecutionContext, inputs: dict[str, Any]) -> Iterator[Output[Any]]:
            session = self._session(context, region)
            group = inputs["group"]
            report = session.drive(
                session.engine.fanouts.run_group(session.execution, step.name, group), step.name
            )
            yield Output(None, "done", metadata=_group_metadata(report))

        return self._op(
            region,
            self.names[region.name] + GROUP_SUFFIX,
            run,
            {"done": Out(Nothing)},
            step,
            ins={"group": In(AnyType)},
            starts=False,
        )

    def _fanin_op(self, region: Region, step: Step) -> OpDefinition:
        def run(context: OpExecutionContext, inputs: dict[str, Any]) -> Iterator[Output[Any]]:
            session = self._session(context, region)
            end = session.drive(session.engine.fanouts.fan_in(session.execution, step.name), step.name)
            pace = session.pace(step.name)
            yield from session.outputs([end], {step.name: RESULT}, self._arc_names(end.fired), pace)
            session.finish([end])

        return self._op(
            region,
            self.names[region.name] + FANIN_SUFFIX,
            run,
            self._outs(region, [step.name]),
            step,
            ins={EXPANDED: In(Nothing), GROUPS: In(Nothing)},
            starts=False,
        )

    def _op(
        self,
        region: Region,
        name: str,
        compute: Callable[[OpExecutionContext, dict[str, Any]], Any],
        outs: dict[str, Any],
        step: Step | None = None,
        *,
        ins: dict[str, In] | None = None,
        starts: bool = True,
    ) -> OpDefinition:
        is_entry = starts and region.name == self.entry
        if ins is None:
            ins = (
                {} if is_entry and not region_has_tokens(self.playbook, region) else {TOKENS_IN: In(Nothing)}
            ) | {
                reading.input: In(Nothing)
                for reading in self.readings
                if any(name in reading.steps for name in region.steps)
            }
        kinds = {task.kind for name in region.steps for task in self.playbook.step(name).tasks}

        # not annotated: Dagster refuses annotations that are text, as they are in this module
        def compute_fn(context, inputs):  # type: ignore[no-untyped-def]
            yield from compute(context, inputs)

        return OpDefinition(
            name=f"{self.prefix}__{name}",
            compute_fn=compute_fn,
            ins=ins,
            outs=outs,
            description=step.description if step is not None else f"steps {', '.join(region.steps)}",
            config_schema={WORKLOAD: dict} if is_entry else None,
            required_resource_keys={
                NOETL,
                *([PYSPARK] if self._is_before_spark(region) else []),
                *([DEFAULT_IO] if is_entry else []),
            },
            tags={f"dagster/kind/{kind}": "" for kind in sorted(kinds)},
            pool=next(filter(None, (self.playbook.step(name).spec.pool for name in region.steps)), None),
        )

    def _is_before_spark(self, region: Region) -> bool:
        """Whether a step of a region uses Spark, or one that its arcs may lead to: the session starts ahead."""
        waiting, seen = list(region.steps), set(region.steps)
        while waiting:
            step = self.playbook.step(waiting.pop())
            if uses_spark(self.playbook, step):
                return True
            ahead = [name for name in step.targets if name in self.steps and name not in seen]
            seen.update(ahead)
            waiting += ahead
        return False

    def _outs(self, region: Region, steps: list[str]) -> dict[str, Out]:
        step = self.playbook.step(steps[0])
        result = {RESULT: _result_out(step)} if step.is_asset else {}
        return result | self._check_outs(region) | self._arc_outs(region)

    def _check_outs(self, region: Region) -> dict[str, Out]:
        return {
            check_output(self.steps[name], check.name): Out(Nothing, is_required=False)
            for name in region.steps
            if self.playbook.step(name).is_asset
            for check in self.playbook.step(name).checks
        }

    def _arc_outs(self, region: Region) -> dict[str, Out]:
        return {arc_output(self.steps[target]): Out(Nothing, is_required=False) for target in region.targets}

    def _arc_names(self, fired: list[str] | tuple[str, ...]) -> list[str]:
        return [arc_output(self.steps[target]) for target in fired]

    def _session(self, context: OpExecutionContext, region: Region) -> OpSession:
        workload = context.op_config[WORKLOAD] if context.op_config else None
        return OpSession.open(context, self.playbook, workload)


@dataclass(slots=True)
class OpSession:
    """One op's work on the execution of its run.

    Attributes:
        playbook: what the op was made of; the execution keeps the text that it began with.
    """

    context: OpExecutionContext
    engine: Engine
    execution: Execution
    playbook: Playbook

    @classmethod
    def open(
        cls, context: OpExecutionContext, playbook: Playbook, workload: dict[str, Any] | None
    ) -> OpSession:
        resource: NoetlResource = getattr(context.resources, NOETL)
        engine = resource.engine()
        engine.runtime.elsewhere = Elsewhere(engine.runtime, context).find
        engine.runtime.partition_of = chosen_partition
        pyspark = getattr(context.resources, PYSPARK, None)
        if pyspark is not None:  # the run's own, with the configuration of this run
            engine.runtime.box.spark = lambda: pyspark.spark_session
        with About(run_id=context.run_id):
            execution = run_sync(attach(engine, context.instance, context.run, playbook, workload))
        processes = processes_of(context.run.run_config)
        if processes is not None:
            engine.crew.set_processes(execution.id, processes)
        if runs_in_one_process(context):
            prepare_spark(engine.runtime, execution)
        return cls(context, engine, execution, playbook)

    def drive(self, work: Any, step: str) -> Any:
        work = self.engine.guard(self.execution, work)
        with About(execution_id=self.execution.id, step=step, run_id=self.context.run_id):
            return drive(self.context, self.engine, work, execution_id=self.execution.id, step=step)

    def outputs(
        self,
        ends: list[StepEnd],
        results: dict[str, str],
        arcs: list[str],
        metadata: dict[str, Any] | None = None,
    ) -> Iterator[Any]:
        """The results that there are, what their checks said, and a token for each arc that fired."""
        for end in ends:
            step = self.playbook.step(
                end.step
            )  # as the op was made: the file may have changed since the start
            if not step.is_asset:
                continue
            if end.status is StepStatus.COMPLETED:
                reference = run_sync(reference_of(self.engine.runtime, self.execution.id, end))
                yield Output(reference, results[end.step], metadata=self._metadata(end) | (metadata or {}))
            declared = {check.name for check in step.checks}
            for outcome in self.execution.state.checks_of(end.step, end.visit):
                if outcome.name in declared:
                    yield self._check_result(outcome)
        for name in arcs:
            yield Output(None, name)

    def _check_result(self, outcome: CheckOutcome) -> AssetCheckResult:
        return AssetCheckResult(
            passed=outcome.passed,
            asset_key=asset_key(self.playbook, outcome.step),
            check_name=outcome.name,
            severity=AssetCheckSeverity.WARN
            if outcome.severity == Severity.WARN
            else AssetCheckSeverity.ERROR,
            description=outcome.why or None,
            metadata={"execution": str(self.execution.id), **_facts(outcome.facts)},
        )

    def pace(self, step: str) -> dict[str, Any]:
        """Seconds and shards a second of the fan-out that has just ended, for its asset."""
        pool = self.engine.runtime.pool
        found = [one for one in run_sync(loop_progress(pool, self.execution.id)) if one.step == step]
        if not found:
            return {}
        return {"seconds": round(found[-1].seconds, 3), "shards a second": round(found[-1].rate, 1)}

    def finish(self, ends: list[StepEnd]) -> None:
        """Ends the execution when this was its last step, and fails the op when its failure has no arc."""
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

    def _metadata(self, end: StepEnd) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "execution": str(self.execution.id),
            "visit": MetadataValue.int(end.visit),
        }
        for key in ("total", "done", "failed"):
            if isinstance(end.envelope.get(key), int):
                metadata[key] = MetadataValue.int(end.envelope[key])
        return metadata | _spark_metadata(end.envelope.get("spark"))


def needs_spark(playbook: Playbook) -> bool:
    """Whether a step runs on Spark in this process."""
    return any(uses_spark(playbook, step) for step in playbook.steps)


def region_has_tokens(playbook: Playbook, region: Region) -> bool:
    """Whether arcs from outside lead into a region."""
    return any(
        target in region.steps
        for step in playbook.steps
        if step.name not in region.steps
        for target in step.targets
    )


def _spark_metadata(metrics: Any) -> dict[str, Any]:
    """Shuffle, spill and skew of a spark task: ``spark/shuffle_read_bytes``; over Connect what is not known."""
    if not isinstance(metrics, dict):
        return {}
    return {f"spark/{name}": value for name, value in metrics.items() if isinstance(value, int | float | str)}


def _facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts of a check as metadata: examples as a table."""
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


def _group_metadata(report: GroupReport) -> dict[str, Any]:
    return {
        "done": report.done,
        "failed": report.failed,
        "skipped": report.skipped,
        "seconds": round(report.seconds, 3),
        "shards a second": round(report.rate, 1),
    }


def _result_out(step: Step) -> Out:
    return Out(
        AnyType,
        is_required=False,
        io_manager_key=RESULTS_IO,
        description=step.description or f"Result of step {step.name}",
    )


__all__ = ["OpMaker", "ResultRef", "arc_output", "dagster_name"]
