"""Ops: the engine's step functions under Dagster's names for their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dagster import Any as AnyType
from dagster import (
    DynamicOut,
    DynamicOutput,
    In,
    InputContext,
    IOManager,
    Nothing,
    OpDefinition,
    Out,
    Output,
    OutputContext,
    io_manager,
)

from noetl_dagster.compiler.plan import PlaybookPlan, RegionPlan, StepPlan
from noetl_dagster.compiler.pod_tags import op_tags
from noetl_dagster.compiler.result_metadata import prepare_lineage
from noetl_dagster.compiler.session import NOETL, PYSPARK, OpSession
from noetl_dagster.engine.fanout.shards import Group, GroupReport
from noetl_dagster.engine.steps.regions import run_region, run_streams

RESULTS_IO = "noetl_results"
TOKENS_IO = "noetl_tokens"
DEFAULT_IO = "io_manager"
"""Dagster's own, which the config of every graph's outputs asks for, and which a graph of one step would not have."""

WORKLOAD = "workload"
TOKENS_IN = "tokens"
GROUPS = "groups"
EXPANDED = "expanded"
DONE = "done"


class TokenIOManager(IOManager):
    """IO manager of the values between ops. It stores nothing.

    A group of shards is written in its mapping key, and all other state is in the event log.
    """

    def handle_output(self, context: OutputContext, obj: Any) -> None:
        """Stores nothing."""

    def load_input(self, context: InputContext) -> Any:
        """Returns the group of shards that the mapping key names; None for other inputs."""
        upstream = context.upstream_output
        key = upstream.mapping_key if upstream is not None else None
        return Group.parse(key) if key is not None else None


@io_manager
def token_io_manager() -> TokenIOManager:
    """Returns the IO manager of the values between ops."""
    return TokenIOManager()


def ops_of(plan: PlaybookPlan, region: RegionPlan) -> list[OpDefinition]:
    """Returns the ops of a region: one, or the three of a fan-out."""
    ops = _RegionOps(plan, region)
    if region.region.is_joint:
        return [ops.joint()]
    return [ops.expand(), ops.group(), ops.fan_in()] if region.is_fanout else [ops.single()]


@dataclass(frozen=True, slots=True)
class _RegionOps:
    """Makes the ops of one region."""

    plan: PlaybookPlan
    region: RegionPlan

    def single(self) -> OpDefinition:
        """Returns the op of a step."""
        [one] = self.region.steps

        def run(session: OpSession, inputs: dict[str, Any]) -> Iterator[Output[Any]]:
            prepare_lineage(one.step)
            end = session.drive(session.engine.steps.run(session.execution, one.step.name), one.step.name)
            yield from session.outputs([end], self._arcs(end.fired))
            session.finish([end])

        return self._op(self.region.op, run, self._result_outs() | self._arc_outs())

    def joint(self) -> OpDefinition:
        """Returns the op that walks the steps of a cycle or of a stream."""
        region = self.region.region

        def run(session: OpSession, inputs: dict[str, Any]) -> Iterator[Output[Any]]:
            walk = run_streams if region.is_stream else run_region
            work = walk(session.engine.steps, session.execution, region)
            stream = region.order if region.is_stream else ()
            fired, failure = session.drive(work, region.steps[0], stream)
            latest = session.execution.state.latest
            yield from session.outputs(
                [latest[name] for name in region.steps if name in latest], self._arcs(fired)
            )
            session.finish([failure] if failure is not None else [])

        return self._op(self.region.op, run, self._result_outs() | self._arc_outs())

    def expand(self) -> OpDefinition:
        """Returns the op of a fan-out that divides its shards into groups."""
        [one] = self.region.steps

        def run(session: OpSession, inputs: dict[str, Any]) -> Iterator[Output[Any] | DynamicOutput[Any]]:
            work = session.engine.fanouts.expand(session.execution, one.step.name)
            expanded = session.drive(work, one.step.name)
            session.context.log.info(
                f"{one.step.name}: {expanded.total} shards in {len(expanded.groups)} groups"
            )
            for group in expanded.groups:
                yield DynamicOutput(group, mapping_key=group.key, output_name=GROUPS)
            yield Output(None, EXPANDED, metadata={"shards": expanded.total, "groups": len(expanded.groups)})

        outs: dict[str, Any] = {
            GROUPS: DynamicOut(AnyType, io_manager_key=TOKENS_IO),
            EXPANDED: Out(Nothing),
        }
        return self._op(self.region.op, run, outs)

    def group(self) -> OpDefinition:
        """Returns the op of a fan-out that runs one group of shards."""
        [one] = self.region.steps

        def run(session: OpSession, inputs: dict[str, Any]) -> Iterator[Output[Any]]:
            work = session.engine.fanouts.run_group(session.execution, one.step.name, inputs["group"])
            yield Output(None, DONE, metadata=_group_metadata(session.drive(work, one.step.name)))

        return self._op(self.region.group_op, run, {DONE: Out(Nothing)}, ins={"group": In(AnyType)})

    def fan_in(self) -> OpDefinition:
        """Returns the op of a fan-out that collects the shards' results and routes."""
        [one] = self.region.steps

        def run(session: OpSession, inputs: dict[str, Any]) -> Iterator[Output[Any]]:
            end = session.drive(
                session.engine.fanouts.fan_in(session.execution, one.step.name), one.step.name
            )
            yield from session.outputs([end], self._arcs(end.fired), session.pace(one.step.name))
            session.finish([end])

        return self._op(
            self.region.routing_op,
            run,
            self._result_outs() | self._arc_outs(),
            ins={EXPANDED: In(Nothing), GROUPS: In(Nothing)},
        )

    def _op(
        self,
        name: str,
        compute: Callable[[OpSession, dict[str, Any]], Any],
        outs: dict[str, Any],
        ins: dict[str, In] | None = None,
    ) -> OpDefinition:
        """Returns an op.

        Args:
            ins: of the later ops of a fan-out; default: the tokens of the region's arcs and the assets that it reads.
        """
        plan, region = self.plan, self.region
        starts = region.starts and ins is None
        if ins is None:
            ins = {one.input: In(Nothing) for one in region.readings}
            if region.has_arcs or not region.starts:
                ins = {TOKENS_IN: In(Nothing)} | ins
        kinds = sorted({task.kind for one in region.steps for task in one.step.tasks})
        # of a fan-out only the groups run in pods: the ops before and after them only issue and count
        in_pods = not region.is_fanout or name == region.group_op

        # not annotated: Dagster refuses annotations that are text, as they are in this module
        def compute_fn(context, inputs):  # type: ignore[no-untyped-def]
            workload = context.op_config[WORKLOAD] if context.op_config else None
            session = OpSession.open(context, plan, region, workload)
            if session.is_changed:
                session.walk()
                yield from self._outputs_after_walk(session, outs)
            else:
                yield from compute(session, inputs)

        return OpDefinition(
            name=f"{plan.graph_name}__{name}",
            compute_fn=compute_fn,
            ins=ins,
            outs=outs,
            description=f"steps {', '.join(region.names)}"
            if region.region.is_joint
            else region.steps[0].step.description,
            config_schema={WORKLOAD: dict} if starts else None,
            required_resource_keys={
                NOETL,
                *([PYSPARK] if region.needs_spark else []),
                *([DEFAULT_IO] if starts else []),
            },
            tags={f"dagster/kind/{kind}": "" for kind in kinds}
            | (op_tags(plan.playbook, region.names) if in_pods else {}),
            pool=region.pool,
        )

    def _result_outs(self) -> dict[str, Out]:
        results = {one.result: _result_out(one) for one in self.region.assets}
        checks = {
            one.check_output(check.name): Out(Nothing, is_required=False)
            for one in self.region.assets
            for check in one.checks
        }
        return results | checks

    def _arc_outs(self) -> dict[str, Out]:
        return {target.arc: Out(Nothing, is_required=False) for target in self.region.targets}

    def _arcs(self, fired: Iterable[str]) -> list[str]:
        arcs = {target.step.name: target.arc for target in self.region.targets}
        return [arcs[name] for name in fired]

    def _outputs_after_walk(self, session: OpSession, outs: dict[str, Any]) -> Iterator[Any]:
        """Yields the outputs of an op whose execution had other steps and has ended, as far as there are any."""
        if EXPANDED in outs:
            yield Output(None, EXPANDED)
            return
        latest = session.execution.state.latest
        ends = [latest[name] for name in self.region.names if name in latest]
        targets = self.region.region.targets
        fired = dict.fromkeys(target for end in ends for target in end.fired if target in targets)
        yield from session.outputs(ends, self._arcs(fired))


def _group_metadata(report: GroupReport) -> dict[str, Any]:
    return {
        "done": report.done,
        "failed": report.failed,
        "skipped": report.skipped,
        "seconds": round(report.seconds, 3),
        "shards a second": round(report.rate, 1),
    }


def _result_out(one: StepPlan) -> Out:
    return Out(
        AnyType,
        is_required=False,
        io_manager_key=RESULTS_IO,
        description=one.step.description or f"Result of step {one.step.name}",
    )
