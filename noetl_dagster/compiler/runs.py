"""The execution that a Dagster run drives, and the runs of an execution."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from typing import Any, NamedTuple

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from noetl_dagster.compiler.names import dagster_name
from noetl_dagster.compiler.partitions import PARTITION_TAG
from noetl_dagster.compiler.pipes import JobReports
from noetl_dagster.compiler.plan import PlaybookPlan, RegionPlan
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.addresses import execution_url
from noetl_dagster.engine.recovery.abandoned import ONE_PROCESS, RECOVERY
from noetl_dagster.errors import ExecutionNotFoundError, ExecutionStateError
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.process.tracing import Trace
from noetl_dagster.worker.execution import Execution

logger = logging.getLogger(__name__)

EXECUTION_TAG = "noetl/execution_id"
"""Run tag that names the execution."""

OWNER_TAG = "noetl/run_id"
"""Run tag: the run for which the execution tag was written. Re-executions inherit their parent's."""

RESUME_TAG = "noetl/resume"
"""Run tag of a run that resumes an execution; its value is the run's own id."""

RESUME_EPOCH_TAG = "noetl/resume_epoch"
"""Run tag of a run that was requested to resume an execution before the run's id was known.

Its value is the epoch that the run is to open."""

PAGE_TAG = "noetl/page"
"""Run tag with the address of the execution's page."""

TRACE_TAG = "noetl/trace_id"
"""Run tag that names the trace of the execution, if one is recorded."""

REMEMBERED_RUNS = 64
"""Runs whose ops hand on what they have read; this process seldom drives more at the same time."""

FRESH_SECONDS = 1.0
"""Seconds for which an op need not read again what the op before it has read."""

_LONGEST = 50
"""Characters of a playbook's name in a tag: Dagster allows 63 after the slash."""

_FROM_FAILURE_TAG = "dagster/is_resume_retry"


class HandedOn(NamedTuple):
    """An execution as an op read it at its end, with the time in monotonic seconds."""

    execution: Execution
    op: str
    at: float


class DrivenRun:
    """What the ops of a run that this process drives hand on to later ops, for one playbook.

    Attributes:
        execution_id: of the run's execution; a later op does not read the run's tags again.
        reports: of the jobs that the steps have started.
    """

    def __init__(self) -> None:
        self.execution_id: int | None = None
        self.reports = JobReports()
        self._lock = threading.Lock()
        self._handed_on: HandedOn | None = None

    def hand_on(self, execution: Execution, op: str) -> None:
        """Keeps what an op has read at its end for the next one."""
        with self._lock:
            self._handed_on = HandedOn(execution, op, time.monotonic())

    def take(self, plan: PlaybookPlan, region: RegionPlan) -> Execution | None:
        """Returns the execution as the op before this one has just read it, which no other op uses.

        Only if that op alone leads to this one: the ends of all ops that have to end before this one are in it then.
        """
        with self._lock:
            last, self._handed_on = self._handed_on, None
        if last is None:
            return None
        before = {one.op for one in plan.regions for target in one.targets if target.step.name in region.names}
        return last.execution if before == {last.op} and time.monotonic() - last.at < FRESH_SECONDS else None


_runs: OrderedDict[tuple[str, str], DrivenRun] = OrderedDict()
_runs_lock = threading.Lock()


def driven_run(run: DagsterRun, plan: PlaybookPlan) -> DrivenRun:
    """Returns what the ops of a run have handed on. Of the longest unused runs, nothing is remembered."""
    key = (run.run_id, plan.playbook.name)
    with _runs_lock:
        driven = _runs.setdefault(key, DrivenRun())
        _runs.move_to_end(key)
        if len(_runs) > REMEMBERED_RUNS:
            _runs.popitem(last=False)
    return driven


def execution_tags(execution_id: int, run_id: str, suffix: str = "", *, trace: Trace | None = None) -> dict[str, str]:
    """Returns the tags of a run that drives an execution: with a suffix from :func:`tag_suffix`, and without."""
    plain = {EXECUTION_TAG: str(execution_id), OWNER_TAG: run_id}
    if trace is not None:
        plain[TRACE_TAG] = f"{trace.trace_id:032x}"
    return plain | {f"{name}{suffix}": value for name, value in plain.items()}


def tag_suffix(run: DagsterRun, playbook: str) -> str:
    """Returns the suffix of a playbook's execution tags: empty in a run of its own job.

    A run that materializes chosen assets, from the UI, a backfill or automation, may be of several playbooks.
    """
    return "" if run.job_name == dagster_name(playbook) else _shared_suffix(playbook)


def _shared_suffix(playbook: str) -> str:
    name = dagster_name(playbook)
    if len(name) > _LONGEST:
        name = f"{name[: _LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f".{name}"


def is_continuation(run: DagsterRun, *, starts: bool = False) -> bool:
    """Reports whether a run resumes an execution: from failure, with selected steps, or on request.

    A run that re-executes the whole of its parent starts an execution of its own.

    Args:
        starts: the step that starts executions is among those that the run executes.
    """
    tags = run.tags
    if tags.get(_FROM_FAILURE_TAG) == "true" or tags.get(RESUME_TAG) == run.run_id:
        return True
    if RESUME_EPOCH_TAG in tags and run.parent_run_id is None:  # re-executions inherit the tag
        return True
    return bool(run.parent_run_id and run.step_keys_to_execute) and not starts


def execution_id_of(instance: DagsterInstance, run: DagsterRun, suffix: str, *, starts: bool = False) -> int | None:
    """Returns the execution of a playbook that a run drives or resumes; None if it has not started one yet."""
    candidate: DagsterRun | None = run
    if run.tags.get(OWNER_TAG + suffix) != run.run_id:  # an earlier op may have written its tags
        candidate = instance.get_run_by_id(run.run_id) or run
    while candidate is not None:
        tags = candidate.tags
        continues = is_continuation(candidate, starts=starts and candidate.run_id == run.run_id)
        tag = tags.get(EXECUTION_TAG + suffix)
        if tag is not None and (tags.get(OWNER_TAG + suffix) == candidate.run_id or continues):
            return _execution_in(tag, EXECUTION_TAG + suffix)
        if not continues or candidate.parent_run_id is None:
            return None
        candidate = instance.get_run_by_id(candidate.parent_run_id)
    return None


def _execution_in(text: str, tag: str) -> int:
    if len(text) < 20 and text.isascii() and text.isdecimal() and 0 < int(text) < 2**63:
        return int(text)
    raise ExecutionStateError(f"run tag {tag} is {text[:100]!r}, which is no execution; launch the job without the tag")


async def attach(
    engine: Engine,
    instance: DagsterInstance,
    run: DagsterRun,
    plan: PlaybookPlan,
    region: RegionPlan,
    workload: dict[str, Any] | None,
    one_process: bool = False,
) -> Execution:
    """Returns the execution of a run: its first op starts it, a run that re-executes from failure resumes it.

    Args:
        workload: overrides from the run config; None for ops that cannot start an execution.
        one_process: this process runs all ops of the run, and holds the execution until the end.

    Raises:
        ExecutionStateError: another run has taken the execution over, it has ended, a tag names none, or the run is
            of no partition of a playbook that has them.
    """
    suffix = tag_suffix(run, plan.playbook.name)
    driven = driven_run(run, plan)
    execution_id = driven.execution_id or execution_id_of(instance, run, suffix, starts=workload is not None)
    execution = None
    origin: dict[str, Any] = {"dagster_run_id": run.run_id, **({ONE_PROCESS: True} if one_process else {})}
    if execution_id is not None:
        try:
            execution = driven.take(plan, region) or await engine.runtime.load(execution_id)
        except ExecutionNotFoundError:
            if workload is None:
                raise
    if execution is not None:
        execution = await _join(engine, instance, run, execution, suffix, origin)
    elif workload is None:
        raise ExecutionStateError(
            f"run {run.run_id} has no {EXECUTION_TAG} tag; launch the job again from its first step"
        )
    else:
        partition = None
        if plan.partitions.dimensions:
            if (key := run.tags.get(PARTITION_TAG)) is None:
                raise ExecutionStateError(
                    f"playbook {plan.playbook.name} has partitions, and this run is of none; launch it with one of them"
                )
            partition = plan.partitions.find(key, instance)
        execution = await engine.lifecycle.create(
            plan.playbook,
            workload,
            execution_id=execution_id,
            origin=origin,
            partition=partition,
        )
        _tag(engine, instance, run, execution, suffix)
    await engine.liveness.hold(execution.id)
    driven.execution_id = execution.id
    return execution


async def finish(
    engine: Engine, run: DagsterRun, plan: PlaybookPlan, region: RegionPlan, execution_id: int
) -> ExecutionStatus:
    """Ends an execution if an op of its run was the last one; else hands on what this op has read."""
    execution = await engine.runtime.load(execution_id)
    status = await engine.lifecycle.finish_if_over(execution)
    if status == ExecutionStatus.RUNNING:
        driven_run(run, plan).hand_on(execution, region.op)
    return status


def _tag(engine: Engine, instance: DagsterInstance, run: DagsterRun, execution: Execution, suffix: str) -> None:
    page = execution_url(engine.runtime.settings, execution.id)
    tags = execution_tags(execution.id, run.run_id, suffix, trace=execution.trace)
    tags |= {PAGE_TAG: page, f"{PAGE_TAG}{suffix}": page}
    if not tags.items() <= run.tags.items():
        instance.add_run_tags(run.run_id, tags)


async def _join(
    engine: Engine,
    instance: DagsterInstance,
    run: DagsterRun,
    execution: Execution,
    suffix: str,
    origin: dict[str, Any],
) -> Execution:
    """Returns the execution if it is the run's own, or takes it over in a new epoch."""
    state = execution.state
    if state.status is ExecutionStatus.CANCELLED:
        raise ExecutionStateError(f"execution {execution.id} was cancelled: {state.error}")
    if state.run_id == run.run_id:
        return execution
    continues = is_continuation(run)
    has_no_run = state.epoch == 1 and state.run_id is None  # accepted over HTTP
    if has_no_run and not state.is_running and not continues:
        raise ExecutionStateError(f"execution {execution.id} ended before its run began: {state.error}; this run stops")
    if not has_no_run and not continues:
        raise ExecutionStateError(f"execution {execution.id} was taken over by run {state.run_id}; this run stops")
    is_own = run.parent_run_id is None or run.tags.get(RESUME_TAG) == run.run_id  # re-executions inherit the tag
    if is_own and (wanted := run.tags.get(RESUME_EPOCH_TAG)) is not None:
        if wanted != str(state.epoch + 1):
            raise ExecutionStateError(
                f"execution {execution.id} is in epoch {state.epoch}; this run was to open {wanted[:100]} and stops"
            )
        origin = {**origin, RECOVERY: wanted}
    try:
        execution = await engine.lifecycle.resume(execution.id, origin=origin, after=state.epoch)
    except ExecutionStateError:  # another op of the run may just have opened the epoch
        execution = await engine.runtime.load(execution.id)
        if execution.state.run_id != run.run_id:
            raise
    _tag(engine, instance, run, execution, suffix)
    return execution


def latest_run(instance: DagsterInstance, execution_id: int, playbook: str) -> DagsterRun | None:
    """Returns the newest run that drove an execution: a run over the assets of several playbooks drives several."""
    for suffix in ("", _shared_suffix(playbook)):
        wanted = RunsFilter(tags={f"{EXECUTION_TAG}{suffix}": str(execution_id)})
        runs = instance.get_runs(wanted, limit=1)
        if runs:
            return runs[0]
    return None


def report_lost_run(instance: DagsterInstance, run: DagsterRun) -> None:
    """Reports a run whose process is gone as failed, so that Dagster stops waiting for it."""
    current = instance.get_run_by_id(run.run_id)
    if current is not None and not current.is_finished:
        instance.report_run_failed(
            current, "the process of this run ended without a word; its execution goes on in a new run"
        )


async def reason_against_resuming(
    engine: Engine, instance: DagsterInstance, execution_id: int, playbook: str
) -> str | None:
    """Returns why recovery leaves an execution without a process alone, by its latest run; None if it resumes it.

    An execution whose run was terminated is cancelled here.
    """
    run = latest_run(instance, execution_id, playbook)
    if run is None:
        return None
    if run.status in (DagsterRunStatus.CANCELING, DagsterRunStatus.CANCELED):
        await engine.lifecycle.cancel(execution_id, f"Dagster run {run.run_id} was terminated")
        return "cancelled with its run"
    if _is_pending(instance, run, (await engine.runtime.load(execution_id)).state.run_id):
        return f"its run {run.run_id} waits to be driven"
    return None


def _is_pending(instance: DagsterInstance, run: DagsterRun, driver: str | None) -> bool:
    """Returns True if a run that does not drive its execution is queued, about to start, or between two pods.

    Args:
        driver: the run that drives the execution.
    """
    if run.status is DagsterRunStatus.QUEUED:
        return True
    if run.status not in (DagsterRunStatus.STARTING, DagsterRunStatus.STARTED):
        return False
    try:  # without access to the cluster, a code location has no launcher
        launcher = instance.run_launcher
        between = driver != run.run_id or launcher.supports_resume_run  # K8sRunLauncher does
        if run.status is DagsterRunStatus.STARTED and not between:
            return False
        if not launcher.supports_check_run_worker_health:
            return False
        return launcher.check_run_worker_health(run).status.value == "RUNNING"
    except Exception as error:  # Dagster's run monitoring ends runs that never start or are lost
        logger.warning("cannot check the process of run %s now: %s", run.run_id, error)
        return True
