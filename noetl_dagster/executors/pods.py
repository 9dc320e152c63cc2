"""Steps in pods of their own, where the run's instance launches runs on Kubernetes.

``dagster-k8s`` makes a step's pod just as its own executor does; here a thread of the run waits for it, and hands
on what its process writes into the run's log. ``dagster-k8s`` is imported for a step that asks for a pod, not before.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from dagster import (
    DagsterEvent,
    DagsterEventType,
    DagsterExecutionInterruptedError,
    DagsterInstance,
    DagsterRunStatus,
)

from noetl_dagster.dagster_internals import (
    EngineEventData,
    EventLogCursor,
    ExecuteStepArgs,
    RetryMode,
    SerializableErrorInfo,
    StepFailureData,
    StepHandlerContext,
    StepRetryData,
    serializable_error_info_from_exc_info,
)

POD_TAG = "noetl/pod"
"""Op tag of a step that asks for a pod of its own; the value says whose it is."""

POLL_SECONDS = 1.0
"""The run's log is read so often, once for all steps that have pods."""

HEALTH_SECONDS = 5.0
"""A step's pod is looked at so often: one request to the cluster each time."""

LOST_AT_MOST = 3
"""Pods of one step that may be lost, to a node or an eviction, before the step fails."""

LATE_SECONDS = 20.0
"""Events get their numbers before they are committed, and one may be seen so much later than its successor."""

_ENDS = frozenset(
    {
        DagsterEventType.STEP_SUCCESS,
        DagsterEventType.STEP_FAILURE,
        DagsterEventType.STEP_UP_FOR_RETRY,
        DagsterEventType.RESOURCE_INIT_FAILURE,
    }
)


def wants_pod(step: Any) -> bool:
    return POD_TAG in step.tags


def pods_of(
    job_context: Any, retries: RetryMode, beside: Callable[[Any], bool] | None = None
) -> StepPods | str:
    """What makes pods for the steps of a run, or why there are none.

    Args:
        beside: called with a step's context while its pod runs, until it says that it is done.
    """
    launcher = job_context.instance.run_launcher
    if not any(one.__name__ == "K8sRunLauncher" for one in type(launcher).__mro__):
        return f"runs are launched by {type(launcher).__name__}, not on Kubernetes"
    origin = _code_origin(job_context)
    if origin is None:
        return "this run is of a job that no code location loads"
    from dagster_k8s.container_context import K8sContainerContext
    from dagster_k8s.executor import K8sStepHandler

    handler = K8sStepHandler(
        image=None,
        container_context=K8sContainerContext(),
        load_incluster_config=launcher.load_incluster_config,
        kubeconfig_file=launcher.kubeconfig_file,
        enable_owner_references=launcher.load_incluster_config,  # they end with the run's pod, whatever ended it
    )
    return StepPods(job_context, handler, origin, retries, beside or (lambda context: True))


def _code_origin(job_context: Any) -> Any:
    """Where another process finds the job."""
    origin = job_context.dagster_run.job_code_origin
    find = getattr(job_context.job, "get_python_origin", None)
    return origin or (None if find is None else find())


class StepPods:
    """The pods of one run's steps."""

    def __init__(
        self,
        job_context: Any,
        handler: Any,
        origin: Any,
        retries: RetryMode,
        beside: Callable[[Any], bool],
    ) -> None:
        self._job_context = job_context
        self._handler = handler
        self._origin = origin
        self._retries = retries
        self._beside = beside
        self._log = _RunLog(job_context.instance, job_context.run_id)

    def events(self, context: Any, known_state: Any, stop: threading.Event) -> Iterator[DagsterEvent]:
        """Runs a step in a pod: what its process says, until it has ended or its pod is lost.

        A pod that is lost is a step that is tried again: its op finds in the event log what was done.

        Args:
            stop: set when the run is to end, which deletes the pod.

        Raises:
            DagsterExecutionInterruptedError: ``stop`` was set.
        """
        key = context.step.key
        pod = self._handler_context(context, known_state)
        self._log.forget(key)
        try:
            list(self._handler.launch_step(pod))
        except Exception:
            yield DagsterEvent.step_failure_event(context, self._failure(_caught()))
            return
        done_beside, stopped_at, looked_at = False, None, time.monotonic()
        while True:
            for event in self._log.of(key):
                if _was_interrupted(event) and not stop.is_set():
                    if (
                        self._is_terminated()
                    ):  # its own work found out, and this process has not heard of it yet
                        yield event
                        raise DagsterExecutionInterruptedError
                    yield self._lost(context, known_state, f"the pod of step {key} was told to end")
                    return
                yield event
                if event.is_resource_init_failure:
                    yield DagsterEvent.step_failure_event(
                        context, self._failure(event.engine_event_data.error)
                    )
                if event.event_type in _ENDS:
                    return
            if stop.is_set() and stopped_at is None:
                stopped_at = time.monotonic()
                list(self._handler.terminate_step(pod))
            now = time.monotonic()
            if now - looked_at >= HEALTH_SECONDS:
                looked_at = now
                trouble = self._trouble(context, pod)
                if trouble is not None and not self._log.has_more(key):
                    if stop.is_set():
                        raise DagsterExecutionInterruptedError
                    yield self._lost(context, known_state, trouble)
                    return
            done_beside = done_beside or self._beside(context)
            stop.wait(POLL_SECONDS) if stopped_at is None else time.sleep(POLL_SECONDS)

    def _is_terminated(self) -> bool:
        run = self._job_context.instance.get_run_by_id(self._job_context.run_id)
        return run is not None and run.status in (DagsterRunStatus.CANCELING, DagsterRunStatus.CANCELED)

    def _trouble(self, context: Any, pod: Any) -> str | None:
        """What is wrong with a step's pod; nothing where the cluster does not answer: it may, later."""
        try:
            health = self._handler.check_step_health(pod)
        except Exception:
            DagsterEvent.engine_event(
                context,
                f"cannot look at the pod of step {context.step.key} just now",
                EngineEventData(error=_caught()),
            )
            return None
        return None if health.is_healthy else str(health.unhealthy_reason)

    def _lost(self, context: Any, known_state: Any, why: str) -> DagsterEvent:
        """The step again in another pod, or its failure when that happened too often."""
        lost = 1 + known_state.get_retry_state().get_attempt_count(context.step.key)
        error = SerializableErrorInfo(message=why, stack=[], cls_name=None)
        if lost <= LOST_AT_MOST and not self._retries.disabled:
            return DagsterEvent.step_retry_event(context, StepRetryData(error=error))
        return DagsterEvent.step_failure_event(context, self._failure(error))

    def _failure(self, error: Any) -> Any:
        return StepFailureData(error=error, user_failure_data=None)

    def _handler_context(self, context: Any, known_state: Any) -> Any:
        job_context = self._job_context
        return StepHandlerContext(
            instance=job_context.instance,
            plan_context=job_context,
            steps=[context.step],
            execute_step_args=ExecuteStepArgs(
                job_origin=self._origin,
                run_id=job_context.run_id,
                step_keys_to_execute=[context.step.key],
                instance_ref=job_context.instance.get_ref(),
                retry_mode=self._retries.for_inner_plan(),
                known_state=known_state,
                # not verified: a pod that the cluster starts once more goes on where the log says
                should_verify_step=False,
                print_serialized_events=False,
            ),
            dagster_run=job_context.dagster_run,
        )


class _RunLog:
    """What is new in a run's log, by step; read once for all threads that ask."""

    def __init__(self, instance: DagsterInstance, run_id: str) -> None:
        self._instance = instance
        self._run_id = run_id
        self._lock = threading.Lock()
        self._waiting: defaultdict[str, deque[DagsterEvent]] = defaultdict(deque)
        self._seen: set[int] = set()
        self._cursor: str | None = None
        self._read_at = -POLL_SECONDS

    def forget(self, key: str) -> None:
        """Leaves out what a step's earlier pods have said."""
        with self._lock:
            self._read()
            self._waiting.pop(key, None)

    def of(self, key: str) -> Iterator[DagsterEvent]:
        """What a step has said since it was last asked."""
        with self._lock:
            if time.monotonic() - self._read_at >= POLL_SECONDS:
                self._read()
            found = self._waiting.pop(key, deque())
        yield from found

    def has_more(self, key: str) -> bool:
        """Whether a step has said anything that nobody has taken yet."""
        with self._lock:
            self._read()
            return bool(self._waiting.get(key))

    def _read(self) -> None:
        settled = None
        page = self._instance.get_records_for_run(self._run_id, self._cursor, of_type=set(DagsterEventType))
        for record in page.records:
            if record.storage_id not in self._seen:
                self._seen.add(record.storage_id)
                event = record.event_log_entry.dagster_event
                if event is not None and event.step_key is not None:
                    self._waiting[event.step_key].append(event)
            if record.event_log_entry.timestamp < time.time() - LATE_SECONDS:
                settled = record.storage_id
        if settled is not None:
            self._cursor = EventLogCursor.from_storage_id(settled).to_string()
            self._seen = {number for number in self._seen if number > settled}
        self._read_at = time.monotonic()


def _caught() -> Any:
    return serializable_error_info_from_exc_info(sys.exc_info())


def _was_interrupted(event: DagsterEvent) -> bool:
    """Whether a step failed because its process was told to end: an eviction, a drained node."""
    error = event.step_failure_data.error if event.is_step_failure else None
    return error is not None and error.cls_name == DagsterExecutionInterruptedError.__name__
