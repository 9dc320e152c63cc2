"""The sensor that resumes executions whose process died."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from dagster import (
    DagsterInstance,
    DefaultSensorStatus,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    sensor,
)

from noetl_dagster.compiler.automation import read_cursor
from noetl_dagster.compiler.job import PlaybookJob
from noetl_dagster.compiler.names import sensor_name
from noetl_dagster.compiler.partitions import partition_tags, stored_partition
from noetl_dagster.compiler.runs import (
    EXECUTION_TAG,
    RESUME_EPOCH_TAG,
    latest_run,
    reason_against_resuming,
    report_lost_run,
)
from noetl_dagster.engine.recovery.abandoned import REQUESTS, Abandoned, ResumeRequest, Verdict
from noetl_dagster.resources.engines import EngineProvider

INTERVAL = 30
"""Seconds between two ticks."""


def build_recovery_sensor(
    jobs: Sequence[PlaybookJob], noetl: EngineProvider, among: str | None = None
) -> SensorDefinition:
    """Builds a sensor for the jobs of a code location. It runs by default, so a restart needs no manual step.

    Args:
        among: name of the folder of these jobs; the sensors of other folders handle the other executions.
    """
    by_name = {job.playbook.name: job for job in jobs}

    @sensor(
        name=sensor_name("noetl_recovery", among),
        description="Resumes executions whose process died, several times, with growing pauses.",
        jobs=[job.job for job in jobs],
        minimum_interval_seconds=INTERVAL,
        default_status=DefaultSensorStatus.RUNNING,
    )
    def noetl_recovery(context: SensorEvaluationContext) -> SensorResult:
        requested = read_cursor(context, REQUESTS, {}, "earlier requests to resume executions do not count")
        abandoned = noetl.run(noetl.engine().recovery().abandoned(requested))
        if among is not None:
            abandoned = [one for one in abandoned if one.playbook in by_name]
        requests, notes = [], []
        for one in abandoned:
            request, note = _act(context.instance, one, by_name, noetl)
            notes.append(f"execution {one.execution_id} of {one.playbook}: {note}")
            if request is not None:
                requests.append(request)
                before = requested.get(one.execution_id)
                count = before.requests + 1 if before is not None and before.epoch == one.epoch else 1
                requested[one.execution_id] = ResumeRequest(one.epoch, count, time.time())
        for note in notes:
            context.log.info(note)
        without_process = {one.execution_id for one in abandoned}
        cursor = REQUESTS.dump_json({key: value for key, value in requested.items() if key in without_process}).decode()
        reason = "; ".join(notes) or "every running execution has its process"
        return SensorResult(run_requests=requests, cursor=cursor, skip_reason=None if requests else reason)

    return noetl_recovery


def _act(
    instance: DagsterInstance, one: Abandoned, jobs: Mapping[str, PlaybookJob], noetl: EngineProvider
) -> tuple[RunRequest | None, str]:
    """Carries out a verdict, and returns the run to launch, if any, and a line for the log."""
    engine = noetl.engine()
    reason = noetl.run(reason_against_resuming(engine, instance, one.execution_id, one.playbook))
    if reason is not None:
        return None, reason
    if one.verdict is Verdict.WAIT:
        return None, f"without a process; checked again in {max(one.due - time.time(), 0):.0f} s"
    if one.verdict is Verdict.GIVE_UP:
        noetl.run(engine.recovery().give_up(one))
        return None, f"given up after {one.attempts} recoveries"
    job = jobs.get(one.playbook)
    if job is None or job.playbook.source != one.source:
        return None, (
            "without a process, and its playbook has changed or is not in this code location; "
            f"resume it with 'noetl-dagster resume {one.execution_id}'"
        )
    if (run := latest_run(instance, one.execution_id, one.playbook)) is not None:
        report_lost_run(instance, run)
    state = noetl.run(engine.runtime.state(one.execution_id))
    request = RunRequest(
        run_key=f"noetl-recovery/{one.execution_id}/{one.epoch}/{one.attempts}",
        job_name=job.plan.name,
        tags={
            EXECUTION_TAG: str(one.execution_id),
            RESUME_EPOCH_TAG: str(one.epoch),
            **partition_tags(stored_partition(state.partition)),
        },
    )
    return request, f"resumed as epoch {one.epoch}"
