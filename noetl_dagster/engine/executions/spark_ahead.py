"""Starts Spark's session, which takes long, while earlier steps run."""

from __future__ import annotations

from noetl_dagster.engine.executions.lifecycle import outstanding
from noetl_dagster.engine.runtime import Runtime
from noetl_dagster.playbook.models import FanoutEngine, Playbook, RoutingMode, Step
from noetl_dagster.playbook.rules import workbook_name
from noetl_dagster.spark.ahead import may_start_ahead, start_ahead
from noetl_dagster.worker.execution import Execution

SPARK = "spark"

SHORT_SECONDS = 60.0
"""Spark steps that took no longer in the execution before this one are faster with the JVM's first compiler alone."""

# Seconds of steps ($2) in the newest completed execution of the playbook, one with the same workload before others.
SECONDS_BEFORE = """
WITH own AS (  -- from the log, since a new execution may not be projected yet
    SELECT context -> 'workload' AS workload, context ->> 'path' AS path
    FROM noetl.event WHERE execution_id = $1 AND event_type = 'playbook.initialized' LIMIT 1
), earlier AS (
    SELECT execution_id, execution.state -> 'workload' AS workload
    FROM noetl.execution JOIN noetl.catalog USING (catalog_id) JOIN own USING (path)
    WHERE status = 'COMPLETED' AND execution_id <> $1
    ORDER BY execution_id DESC LIMIT 20
), newest AS (
    SELECT execution_id FROM earlier, own ORDER BY earlier.workload = own.workload DESC, execution_id DESC LIMIT 1
)
SELECT sum(seconds)::float8 FROM (
    SELECT extract(epoch FROM max(created_at) FILTER (WHERE event_type = 'step.exit')
                            - min(created_at) FILTER (WHERE event_type = 'step.enter')) AS seconds
    FROM noetl.event JOIN newest USING (execution_id)
    WHERE node_name = ANY($2::text[]) AND event_type IN ('step.enter', 'step.exit')
    GROUP BY node_name
) steps
"""

_ALWAYS = (None, "step.done", "call.done", "step.exit", "call.partial")
"""Values of an arc's ``on`` that fire when a step succeeds, and ``call.partial``, whose consumers begin with it."""


async def prepare_spark(runtime: Runtime, execution: Execution) -> bool:
    """Begins to start Spark's session in this process if the execution will certainly need it; returns true if so."""
    is_wanted = execution.services.tool_of is None and may_start_ahead(runtime.settings)
    steps = spark_steps_ahead(execution) if is_wanted else []
    if not steps:
        return False
    python_too = any(_runs_as_spark_job(execution.playbook.step(name)) for name in steps)
    before = await runtime.pool.fetchval(SECONDS_BEFORE, execution.id, steps)
    short = (before or 0.0) <= SHORT_SECONDS
    spark = runtime.tool_context.spark_of(execution.services)
    return start_ahead(spark, runtime.settings, python_too=python_too, short=short)


def spark_steps_ahead(execution: Execution) -> list[str]:
    """Returns the steps that have not ended, will certainly be reached, and use Spark in this process.

    A JVM takes some 500 MB: where a condition decides whether a step runs, it is not started before that is
    decided. Steps of the pool start one in their worker, and those that ask for a pod in that.
    """
    graph, state = execution.program.graph, execution.state
    reached, _ = outstanding(execution)
    waiting = [step for name in reached for step in graph.by_name[name].entries]
    seen = set(waiting)
    names = []
    while waiting:
        step = execution.playbook.step(waiting.pop())
        if step.spec.admit not in (None, True):
            continue
        ended = state.end_of(step.name, 1) is not None
        here = _runs_as_spark_job(step) or not execution.program.step(step.name).in_pool
        if not ended and here and step.spec.pod is None and uses_spark(execution.playbook, step):
            names.append(step.name)
        for target in _sure_targets(step):
            if target in graph.reachable and target not in seen:
                seen.add(target)
                waiting.append(target)
    return names


def _sure_targets(step: Step) -> list[str]:
    """Returns the steps that follow a success of this one, whatever its result is."""
    sure = []
    for arc in step.routing.arcs:
        unconditional = arc.when in (None, True) and arc.on in _ALWAYS
        if unconditional:
            sure.append(arc.step)
        if step.routing.mode is RoutingMode.EXCLUSIVE and not arc.is_stream:
            break  # the first arc that matches is taken, which may be this one
    return sure


def uses_spark(playbook: Playbook, step: Step) -> bool:
    """Reports that a step has a spark task, its own or the workbook's, or runs its shards as a Spark job."""
    for task in step.tasks:
        named = task
        if task.kind == "workbook":
            named = playbook.workbook.get(workbook_name(task), task)
        if named.kind == SPARK:
            return True
    return _runs_as_spark_job(step)


def _runs_as_spark_job(step: Step) -> bool:
    return step.is_fanout and step.loop is not None and step.loop.fanout.engine is FanoutEngine.SPARK
