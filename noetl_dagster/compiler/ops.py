"""Ops: the step function of the engine under Dagster's names for its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dagster import Any as AnyType
from dagster import (
    DynamicOut,
    DynamicOutput,
    In,
    Nothing,
    OpDefinition,
    OpExecutionContext,
    Out,
    Output,
)

from noetl_dagster.compiler.config import WORKLOAD
from noetl_dagster.compiler.lineage.metadata import prepare_lineage
from noetl_dagster.compiler.lineage.tables import Writers, no_writers
from noetl_dagster.compiler.names import FANIN_SUFFIX, GROUP_SUFFIX, dagster_name
from noetl_dagster.compiler.pod_tags import op_tags
from noetl_dagster.compiler.readings import Reading
from noetl_dagster.compiler.session import NOETL, PYSPARK, OpSession
from noetl_dagster.compiler.tokens import TOKENS
from noetl_dagster.engine.executions.spark_ahead import uses_spark
from noetl_dagster.engine.fanout.shards import GroupReport
from noetl_dagster.engine.steps.regions import run_region, run_streams
from noetl_dagster.playbook.graph import Region
from noetl_dagster.playbook.models import Playbook, Step
from noetl_dagster.result_ref import ResultRef

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
        writers: the assets whose steps write a table.
    """

    playbook: Playbook
    names: dict[str, str]
    steps: dict[str, str]
    entry: str
    prefix: str
    readings: tuple[Reading, ...] = ()
    writers: Writers = no_writers

    def step_ops(self, region: Region) -> list[OpDefinition]:
        """The ops of a region: one, or the three of a fan-out."""
        if region.is_joint:
            return [self._region_op(region)]
        step = self.playbook.step(region.steps[0])
        if step.is_fanout:
            return [self._expand_op(region, step), self._group_op(region, step), self._fanin_op(region, step)]
        return [self._step_op(region, step)]

    def _step_op(self, region: Region, step: Step) -> OpDefinition:
        def run(session: OpSession, inputs: dict[str, Any]) -> Iterator[Output[Any]]:
            prepare_lineage(step)
            end = session.drive(session.engine.steps.run(session.execution, step.name), step.name)
            yield from session.outputs([end], {step.name: RESULT}, self._arc_names(end.fired))
            session.finish([end])

        return self._op(region, self.names[region.name], run, self._outs(region, [step.name]), step)

    def _region_op(self, region: Region) -> OpDefinition:
        def run(session: OpSession, inputs: dict[str, Any]) -> Iterator[Output[Any]]:
            walk = run_streams if region.is_stream else run_region
            work = walk(session.engine.steps, session.execution, region)
            stream = region.order if region.is_stream else ()
            fired, failure = session.drive(work, region.steps[0], stream)
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
        def run(session: OpSession, inputs: dict[str, Any]) -> Iterator[Output[Any] | DynamicOutput[Any]]:
            work = session.engine.fanouts.expand(session.execution, step.name)
            expanded = session.drive(work, step.name)
            session.context.log.info(f"{step.name}: {expanded.total} shards in {len(expanded.groups)} groups")
            for group in expanded.groups:
                yield DynamicOutput(group, mapping_key=group.key, output_name=GROUPS)
            yield Output(None, EXPANDED, metadata={"shards": expanded.total, "groups": len(expanded.groups)})

        outs: dict[str, Any] = {
            GROUPS: DynamicOut(AnyType, io_manager_key=TOKENS),
            EXPANDED: Out(Nothing),
        }
        return self._op(region, self.names[region.name], run, outs, step)

    def _group_op(self, region: Region, step: Step) -> OpDefinition:
        def run(session: OpSession, inputs: dict[str, Any]) -> Iterator[Output[Any]]:
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
        def run(session: OpSession, inputs: dict[str, Any]) -> Iterator[Output[Any]]:
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
        compute: Callable[[OpSession, dict[str, Any]], Any],
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
            session = self._session(context, region)
            if session.is_foreign:
                session.walk()
                yield from self._as_it_went(session, region, outs)
            else:
                yield from compute(session, inputs)

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
            tags={f"dagster/kind/{kind}": "" for kind in sorted(kinds)} | self._pod_tags(region, name),
            pool=next(filter(None, (self.playbook.step(name).dagster_pool for name in region.steps)), None),
        )

    def _pod_tags(self, region: Region, name: str) -> dict[str, str]:
        """Of a fan-out its groups are in pods: what comes before and after them only issues and counts."""
        step = self.playbook.step(region.steps[0])
        if step.is_fanout and name != self.names[region.name] + GROUP_SUFFIX:
            return {}
        return op_tags(self.playbook, region.steps)

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

    def _as_it_went(self, session: OpSession, region: Region, outs: dict[str, Any]) -> Iterator[Any]:
        """What there is of an op's steps in an execution of other steps, which has ended."""
        if EXPANDED in outs:
            yield Output(None, EXPANDED)
            return
        latest = session.execution.state.latest
        ends = [latest[name] for name in region.steps if name in latest]
        results = {
            name: f"{RESULT}_{self.steps[name]}" if region.is_joint else RESULT for name in region.steps
        }
        fired = dict.fromkeys(target for end in ends for target in end.fired if target in region.targets)
        yield from session.outputs(ends, results, self._arc_names(list(fired)))

    def _session(self, context: OpExecutionContext, region: Region) -> OpSession:
        workload = context.op_config[WORKLOAD] if context.op_config else None
        return OpSession.open(context, self.playbook, workload, self.writers, region.steps)


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
