"""Steps in pods of their own, if the run's instance launches runs on Kubernetes.

``dagster-k8s`` makes a step's pod as its own executor does. Here a thread of the run waits for the pod, and passes on
the events that its process writes to the run's log. ``dagster-k8s`` is imported for the first step that asks for a pod.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dagster import (
    DagsterEvent,
    DagsterEventType,
    DagsterExecutionInterruptedError,
    DagsterInstance,
    DagsterInvariantViolationError,
    DagsterRunStatus,
)

from noetl_dagster.compiler.names import POD_TAG
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
from noetl_dagster.tools.commands.cluster import NO_RIGHT

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Seconds between two reads of the run's log, for all steps that have pods."""

HEALTH_SECONDS = 5.0
"""Seconds between two requests to the cluster for the state of a step's pod."""

REQUEST_SECONDS = 30.0
"""Seconds after which a request to the cluster fails."""

BESIDE_SECONDS = 5.0
"""Seconds between two calls of ``beside`` that succeeded; others are repeated each second."""

LOST_AT_MOST = 3
"""Pods of one step that may be lost, to a node or an eviction, before the step fails."""

LATE_SECONDS = 20.0
"""Seconds by which an event may be visible later than its successor: it gets its number before it is committed."""

_ENDS = frozenset(
    {
        DagsterEventType.STEP_SUCCESS,
        DagsterEventType.STEP_FAILURE,
        DagsterEventType.STEP_UP_FOR_RETRY,
        DagsterEventType.RESOURCE_INIT_FAILURE,
    }
)


def wants_pod(step: Any) -> bool:
    """Reports whether a step asks for a pod of its own."""
    return POD_TAG in step.tags


def pods_of(job_context: Any, retries: RetryMode, beside: Callable[[Any], bool] | None = None) -> StepPods | str:
    """Returns the maker of pods for the steps of a run, or the reason why there is none.

    Args:
        beside: called repeatedly with a step's context while its pod runs; returns True if it succeeded. Its exceptions
            are logged, and do not end the step.

    Raises:
        DagsterInvariantViolationError: the run's pod has no token for the cluster.
    """
    launcher = job_context.instance.run_launcher
    if not any(one.__name__ == "K8sRunLauncher" for one in type(launcher).__mro__):
        return f"runs are launched by {type(launcher).__name__}, not on Kubernetes"
    origin = _code_origin(job_context)
    if origin is None:
        return "this run is of a job that no code location loads"
    from dagster_k8s.container_context import K8sContainerContext
    from dagster_k8s.executor import K8sStepHandler
    from kubernetes.config import ConfigException

    try:
        handler = K8sStepHandler(
            image=None,
            container_context=K8sContainerContext(),
            load_incluster_config=launcher.load_incluster_config,
            kubeconfig_file=launcher.kubeconfig_file,
            enable_owner_references=launcher.load_incluster_config,  # they end with the run's pod, whatever ended it
        )
    except ConfigException as error:  # a pod without a token
        raise DagsterInvariantViolationError(
            f"steps with spec.kubernetes need pods of their own: {error} {NO_RIGHT}"
        ) from None
    _bound_requests(handler)
    return StepPods(job_context, handler, origin, retries, beside or (lambda context: True))


def _bound_requests(handler: Any) -> None:
    """Limits every request of a handler to :data:`REQUEST_SECONDS`: by default the clients wait forever."""
    for api in (handler._api_client.batch_api, handler._api_client.core_api):
        client = api.api_client

        def request(*arguments: Any, _request_timeout: Any = None, asked: Any = client.request, **more: Any) -> Any:
            return asked(*arguments, _request_timeout=_request_timeout or REQUEST_SECONDS, **more)

        client.request = request


def _code_origin(job_context: Any) -> Any:
    """Returns the address of the job's code for another process."""
    origin = job_context.dagster_run.job_code_origin
    find = getattr(job_context.job, "get_python_origin", None)
    return origin or (None if find is None else find())


class StepPods:
    """The pods of one run's steps."""

    def __init__(
        self, job_context: Any, handler: Any, origin: Any, retries: RetryMode, beside: Callable[[Any], bool]
    ) -> None:
        self._job_context = job_context
        self._handler = handler
        self._origin = origin
        self._retries = retries
        self._beside = beside
        self._losses: Counter[str] = Counter()
        self._away: set[str] = set()
        self._log = _RunLog(job_context.instance, job_context.run_id)

    def events(self, context: Any, known_state: Any, stop: threading.Event) -> Iterator[DagsterEvent]:
        """Runs a step in a pod, and yields the events of its process until it has ended or its pod is lost.

        The step of a lost pod is tried again: its op finds in the event log what was done.

        Args:
            stop: set when the run is to end, which deletes the pod.

        Raises:
            DagsterExecutionInterruptedError: ``stop`` was set.
        """
        key = context.step.key
        pod = self._handler_context(context, known_state)
        while not (followed := self._tried("the run's log", lambda: self._log.follow(key))):
            if stop.wait(POLL_SECONDS):
                raise DagsterExecutionInterruptedError
        try:
            yield from self._events(context, pod, followed, stop)
        finally:
            self._log.leave(followed)

    def _events(self, context: Any, pod: Any, followed: _Followed, stop: threading.Event) -> Iterator[DagsterEvent]:
        key = context.step.key
        try:
            list(self._handler.launch_step(pod))
        except Exception as error:
            if getattr(error.__cause__, "status", None) == 403:
                error.add_note(NO_RIGHT)
            yield _failure(context, serializable_error_info_from_exc_info(sys.exc_info()))
            return
        terminated = False
        looked_at, beside_at, succeeded_at = time.monotonic(), -BESIDE_SECONDS, None
        while True:
            for event in self._tried("the run's log", lambda: self._log.of(followed), []):
                if _was_interrupted(event) and not stop.is_set():
                    if self._is_terminated(stop):  # the pod has noticed it before this process
                        yield event
                        raise DagsterExecutionInterruptedError
                    yield self._lost(context, f"the pod of step {key} was told to end")
                    return
                yield event
                if event.is_resource_init_failure:
                    yield _failure(context, event.engine_event_data.error)
                if event.event_type in _ENDS:
                    return
            if stop.is_set() and not terminated:
                terminated = self._tried(
                    f"the job of step {key}", lambda: bool([*self._handler.terminate_step(pod), True])
                )
            now = time.monotonic()
            if now - looked_at >= HEALTH_SECONDS:
                looked_at = now
                trouble, succeeded = self._look(context, pod)
                succeeded_at = (succeeded_at or now) if succeeded else None
                if succeeded_at is not None and now - succeeded_at >= LATE_SECONDS:
                    trouble = f"the pod of step {key} succeeded, and the run's log has no end of the step"
                    self._tried("the run's log", lambda: self._log.read_again(followed))
                if trouble is not None and not self._tried("the run's log", lambda: self._log.has_more(followed), True):
                    if stop.is_set():
                        raise DagsterExecutionInterruptedError
                    yield self._lost(context, trouble)
                    return
            if now - beside_at >= BESIDE_SECONDS and self._tried(
                "what goes on beside pods", lambda: self._beside(context)
            ):
                beside_at = now
            time.sleep(POLL_SECONDS) if stop.is_set() else stop.wait(POLL_SECONDS)

    def _tried(self, what: str, attempt: Callable[[], Any], otherwise: Any = False) -> Any:
        """Returns the result of ``attempt``, or ``otherwise`` while a service is unavailable. Logs each outage once."""
        try:
            answer = attempt()
        except Exception as error:
            if what not in self._away:
                self._away.add(what)
                logger.warning("%s: tried again until it succeeds: %s: %s", what, type(error).__name__, error)
            return otherwise
        self._away.discard(what)
        return answer

    def _is_terminated(self, stop: threading.Event) -> bool:
        """Reports whether the run is to end, from its record, which is read until the storage answers."""
        instance, run_id = self._job_context.instance, self._job_context.run_id
        while not (run := self._tried("the run's record", lambda: (instance.get_run_by_id(run_id),))):
            if stop.wait(POLL_SECONDS):
                return True
        return run[0] is not None and run[0].status in (DagsterRunStatus.CANCELING, DagsterRunStatus.CANCELED)

    def _look(self, context: Any, pod: Any) -> tuple[str | None, bool]:
        """Returns the problem of a step's pod, if any, and True if the pod has succeeded.

        There is no problem if the cluster does not answer now.
        """
        key = context.step.key
        what = f"the pod of step {key}"
        handler = self._handler
        try:
            status = handler._api_client.get_job_status(
                namespace=handler._get_container_context(pod).namespace,
                job_name=handler._get_k8s_step_job_name(pod),
            )
        except Exception:
            if what not in self._away:
                self._away.add(what)
                message = f"cannot look at {what} just now"
                data = EngineEventData(error=serializable_error_info_from_exc_info(sys.exc_info()))
                self._tried("the run's log", lambda: DagsterEvent.engine_event(context, message, data))
            return None, False
        self._away.discard(what)
        if not status:
            return f"the Kubernetes job of step {key} could not be found", False
        if status.failed:
            return f"the Kubernetes job of step {key} failed", False
        return None, bool(status.succeeded)

    def _lost(self, context: Any, why: str) -> DagsterEvent:
        """Tries the step again in another pod, or fails it if that happened too often."""
        key = context.step.key
        self._losses[key] += 1
        error = SerializableErrorInfo(message=why, stack=[], cls_name=None)
        if self._losses[key] <= LOST_AT_MOST and not self._retries.disabled:
            return DagsterEvent.step_retry_event(context, StepRetryData(error=error))
        return _failure(context, error)

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
                # not verified: a pod that the cluster starts again continues from the event log
                should_verify_step=False,
                print_serialized_events=False,
            ),
            dagster_run=job_context.dagster_run,
        )


@dataclass(slots=True)
class _Followed:
    """A step whose pod is waited for, by its key.

    Attributes:
        cursor: of the run's log before its pod existed.
        known: numbers of events that earlier pods wrote, and of those in ``waiting`` or taken from it.
    """

    key: str
    cursor: str | None
    known: set[int]
    waiting: list[DagsterEvent] = field(default_factory=list)


class _RunLog:
    """Reads the new events of a run's log, by step; one read serves all threads that ask.

    The age of an event counts from when this process saw its number, whatever the clock of its writer says.
    """

    def __init__(self, instance: DagsterInstance, run_id: str) -> None:
        self._instance = instance
        self._run_id = run_id
        self._lock = threading.Lock()
        self._followed: dict[str, _Followed] = {}
        self._seen: dict[int, float] = {}  # when, by the number
        self._cursor: str | None = None
        self._read_at = -POLL_SECONDS

    def follow(self, key: str) -> _Followed:
        """Collects the events of a step from now on, without those of its earlier pods."""
        with self._lock:
            self._read()
            followed = self._followed[key] = _Followed(key, self._cursor, set(self._seen))
        return followed

    def leave(self, followed: _Followed) -> None:
        """Ends the collection, unless the next try of the step has begun its own meanwhile."""
        with self._lock:
            if self._followed.get(followed.key) is followed:
                del self._followed[followed.key]

    def of(self, followed: _Followed) -> list[DagsterEvent]:
        """Returns the events of a step since the last call."""
        with self._lock:
            if time.monotonic() - self._read_at >= POLL_SECONDS:
                self._read()
            found, followed.waiting = followed.waiting, []
        return found

    def has_more(self, followed: _Followed) -> bool:
        """Reports whether a step has events that were not taken yet."""
        with self._lock:
            self._read()
            return bool(followed.waiting)

    def read_again(self, followed: _Followed) -> None:
        """Reads all that was written since a step was followed: even events that are later than they may be."""
        with self._lock:
            for record in self._records(followed.cursor):
                self._hand_on(record, followed.key)

    def _read(self) -> None:
        now = time.monotonic()
        settled = None
        for record in self._records(self._cursor):
            number = record.storage_id
            if number not in self._seen:
                self._seen[number] = now
                self._hand_on(record)
            elif self._seen[number] < now - LATE_SECONDS:
                settled = number
        if settled is not None:
            self._cursor = EventLogCursor.from_storage_id(settled).to_string()
            self._seen = {number: at for number, at in self._seen.items() if number > settled}
        self._read_at = now

    def _hand_on(self, record: Any, only: str | None = None) -> None:
        event = record.event_log_entry.dagster_event
        if event is None or event.step_key is None or only not in (None, event.step_key):
            return
        followed = self._followed.get(event.step_key)
        if followed is not None and record.storage_id not in followed.known:
            followed.known.add(record.storage_id)
            followed.waiting.append(event)

    def _records(self, cursor: str | None) -> Any:
        return self._instance.get_records_for_run(self._run_id, cursor, of_type=set(DagsterEventType)).records


def _failure(context: Any, error: Any) -> DagsterEvent:
    return DagsterEvent.step_failure_event(context, StepFailureData(error=error, user_failure_data=None))


def _was_interrupted(event: DagsterEvent) -> bool:
    """Returns True if a step failed because its process had to end, as in an eviction or a drained node."""
    error = event.step_failure_data.error if event.is_step_failure else None
    return error is not None and error.cls_name == DagsterExecutionInterruptedError.__name__
