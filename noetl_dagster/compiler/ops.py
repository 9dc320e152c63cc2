"""Ops: the engine's step functions under Dagster's names for their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
)

from noetl_dagster.compiler.names import NOETL, PYSPARK
from noetl_dagster.compiler.plan import PlaybookPlan, RegionPlan
from noetl_dagster.compiler.result_metadata import prepare_lineage
from noetl_dagster.compiler.session import OpSession
from noetl_dagster.compiler.specs import op_tags
from noetl_dagster.engine.fanout.shards import Group, GroupReport
from noetl_dagster.engine.steps.regions import run_region, run_streams
from noetl_dagster.process.environment import settings_withheld
from noetl_dagster.process.redaction import SECRETS

RESULTS_IO = "noetl_results"
TOKENS_IO = "noetl_tokens"
DEFAULT_IO = "io_manager"
"""Dagster's own, which the config of every graph's outputs requires, and which a graph of one step would not have."""

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


def ops_of(plan: PlaybookPlan, region: RegionPlan) -> list[OpDefinition]:
    """Returns the ops of a region: one, or the three of a fan-out."""
    routing = _result_outs(region) | {target.arc: Out(Nothing, is_required=False) for target in region.targets}
    if not region.is_fanout:
        return [_op(plan, region, region.op, _walk if region.region.is_joint else _end_step, routing)]
    groups = {GROUPS: DynamicOut(AnyType, io_manager_key=TOKENS_IO), EXPANDED: Out(Nothing)}
    joined = {EXPANDED: In(Nothing), GROUPS: In(Nothing)}
    return [
        _op(plan, region, region.op, _expand, groups),
        _op(plan, region, region.group_op, _run_group, {DONE: Out(Nothing)}, {"group": In(AnyType)}),
        _op(plan, region, region.routing_op, _end_step, routing, joined),
    ]


Compute = Callable[[OpSession, dict[str, Any]], Iterator[Any]]
"""The body of an op, from its session and its inputs to its outputs."""


def _end_step(session: OpSession, inputs: dict[str, Any]) -> Iterator[Any]:
    """Runs a step, or collects the results of its shards, and routes."""
    step, is_fanout = session.region.steps[0].step, session.region.is_fanout
    prepare_lineage(step)
    run = session.engine.fanouts.fan_in if is_fanout else session.engine.steps.run
    end = session.drive(run(session.execution, step.name), step.name)
    yield from session.outputs([end], end.fired, session.pace(end) if is_fanout else None)
    session.finish([end])


def _walk(session: OpSession, inputs: dict[str, Any]) -> Iterator[Any]:
    """Walks the steps of a cycle or of a stream."""
    region = session.region.region
    walk = run_streams if region.is_stream else run_region
    work = walk(session.engine.steps, session.execution, region)
    fired, failure = session.drive(work, region.steps[0], region.order if region.is_stream else ())
    latest = session.execution.state.latest
    yield from session.outputs([latest[name] for name in region.steps if name in latest], fired)
    session.finish([failure] if failure is not None else [])


def _expand(session: OpSession, inputs: dict[str, Any]) -> Iterator[Any]:
    """Divides the shards of a fan-out into groups."""
    step = session.region.steps[0].step.name
    expanded = session.drive(session.engine.fanouts.expand(session.execution, step), step)
    session.context.log.info(f"{step}: {expanded.total} shards in {len(expanded.groups)} groups")
    for group in expanded.groups:
        yield DynamicOutput(group, mapping_key=group.key, output_name=GROUPS)
    yield Output(None, EXPANDED, metadata={"shards": expanded.total, "groups": len(expanded.groups)})


def _run_group(session: OpSession, inputs: dict[str, Any]) -> Iterator[Any]:
    """Runs one group of shards."""
    step = session.region.steps[0].step.name
    work = session.engine.fanouts.run_group(session.execution, step, inputs["group"])
    report: GroupReport = session.drive(work, step)
    metadata = {
        "done": report.done,
        "failed": report.failed,
        "skipped": report.skipped,
        "seconds": round(report.seconds, 3),
        "shards a second": round(report.rate, 1),
    }
    yield Output(None, DONE, metadata=metadata)


def _outputs_after_walk(session: OpSession, outs: dict[str, Any]) -> Iterator[Any]:
    """Yields the outputs of an op whose execution had other steps and has ended, as far as there are any."""
    if EXPANDED in outs:
        yield Output(None, EXPANDED)
        return
    latest = session.execution.state.latest
    ends = [latest[name] for name in session.region.names if name in latest]
    targets = session.region.region.targets
    fired = dict.fromkeys(target for end in ends for target in end.fired if target in targets)
    yield from session.outputs(ends, fired)


def _op(
    plan: PlaybookPlan,
    region: RegionPlan,
    name: str,
    compute: Compute,
    outs: dict[str, Any],
    ins: dict[str, In] | None = None,
) -> OpDefinition:
    """Returns an op.

    Args:
        ins: of the later ops of a fan-out; default: the tokens of the region's arcs and the assets that it reads.
    """
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
        try:
            with settings_withheld():
                session = OpSession.open(context, plan, region, workload)
                if session.is_changed:
                    session.walk()
                    yield from _outputs_after_walk(session, outs)
                else:
                    yield from compute(session, inputs)
        except Exception as error:  # Dagster stores its text and those of its causes
            SECRETS.redact_error(error)
            raise

    return OpDefinition(
        name=f"{plan.graph_name}__{name}",
        compute_fn=compute_fn,
        ins=ins,
        outs=outs,
        description=f"steps {', '.join(region.names)}" if region.region.is_joint else region.steps[0].step.description,
        config_schema={WORKLOAD: dict} if starts else None,
        required_resource_keys={
            NOETL,
            *([PYSPARK] if region.needs_spark else []),
            *([DEFAULT_IO] if starts else []),
        },
        tags={f"dagster/kind/{kind}": "" for kind in kinds} | (op_tags(plan.playbook, region.names) if in_pods else {}),
        pool=region.pool,
    )


def _result_outs(region: RegionPlan) -> dict[str, Out]:
    results = {
        one.result: Out(
            AnyType,
            is_required=False,
            io_manager_key=RESULTS_IO,
            description=one.step.description or f"Result of step {one.step.name}",
        )
        for one in region.assets
    }
    checks = {
        one.check_output(check.name): Out(Nothing, is_required=False) for one in region.assets for check in one.checks
    }
    return results | checks
