"""Ready steps side by side, on threads of the run's own process.

For steps that wait: on an API, a database, a Spark job, an event loop of their own. Dagster's in-process executor
runs them one after another, and its multiprocess executor starts a process, with all its imports, for each. Here a
step costs as much as in process, and up to ``max_concurrent`` steps wait at the same time.

Everything else is as in process: one set of resources, one file of compute logs, retries, hooks, dynamic outputs,
pools and tag concurrency limits, asset checks, re-execution. Two differences:

- IO managers, resources and hooks are shared by steps that run at the same time, and must be thread-safe.
- Python cannot end a thread. Termination raises ``DagsterExecutionInterruptedError`` inside each step, again every
  second, and never while a lock is being taken. A step that is inside a call of C code ends when that returns, or is
  left behind after ``GRACE_SECONDS``.
"""

from __future__ import annotations

import contextvars
import os
import queue
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from dagster import (
    DagsterEvent,
    DagsterExecutionInterruptedError,
    DagsterInvariantViolationError,
    Executor,
    Field,
    InitExecutorContext,
    Int,
    Noneable,
    executor,
    in_process_executor,
    multiprocess_executor,
)

# private: what InProcessExecutor.execute and inner_plan_execution_iterator use, whose loop runs on threads here
from dagster._core.execution.api import ExecuteRunWithPlanIterable  # private: events of a run's beginning and end
from dagster._core.execution.context_creation_job import PlanExecutionContextManager  # private: a run's resources
from dagster._core.execution.plan.execute_plan import (  # private: the body and the hooks of a step
    _trigger_hook,
    dagster_event_sequence_for_step,
)
from dagster._core.execution.plan.instance_concurrency_context import InstanceConcurrencyContext  # private: pools

from noetl_dagster.process.interrupts import interrupt, let_arrive
from noetl_dagster.settings import MOST_PROCESSES

PROCESSES = "processes"
"""Key of the run config of an executor: the number of processes that work on a large loop."""

MAX_CONCURRENT = 16
"""Steps at the same time, unless the run's config sets it."""

POLL_SECONDS = 0.2
"""Seconds after which a termination is noticed at the latest."""

INTERRUPT_SECONDS = 1.0
GENTLE_SECONDS = 5.0
"""Seconds for which no step is interrupted inside code that the whole process shares, such as a log."""

GRACE_SECONDS = 30.0
"""Seconds after a termination when steps that have not ended are left behind; their threads end with the process."""


_FIELDS: dict[str, Any] = multiprocess_executor.config_schema.as_field().config_type.fields  # type: ignore[attr-defined]


@executor(
    name="threaded",
    config_schema=Field(
        {
            "max_concurrent": Field(
                Noneable(Int),
                default_value=None,
                description=f"The number of steps that may run at the same time. By default {MAX_CONCURRENT}.",
            ),
            **{name: _FIELDS[name] for name in ("tag_concurrency_limits", "retries", "step_dependency_config")},
        },
        description="Execute ready steps at the same time, on threads of one process.",
    ),
)
def threaded_executor(context: InitExecutorContext) -> Executor:
    """Runs ready steps at the same time on threads of the run's process; for steps that mostly wait.

    .. code-block:: yaml

        execution:
          config:
            max_concurrent: 8
            tag_concurrency_limits:
              - {key: database, value: small, limit: 2}
    """
    config: dict[str, Any] = dict(context.executor_config)
    check_numbers("threaded", config)
    return ThreadedExecutor(
        in_process=in_process_executor.executor_creation_fn(context),  # type: ignore[misc,arg-type]
        max_concurrent=config.get("max_concurrent") or MAX_CONCURRENT,
        tag_concurrency_limits=config.get("tag_concurrency_limits") or [],
    )


def check_numbers(executor: str, config: Mapping[str, Any]) -> None:
    """Checks the numbers of threads and processes in the run config of an executor.

    Raises:
        DagsterInvariantViolationError: a number is negative, so that no step could begin, or far too large.
    """
    for name, most in (("max_concurrent", None), (PROCESSES, MOST_PROCESSES)):
        value = config.get(name)
        if isinstance(value, int) and not 0 <= value <= (value if most is None else most):
            allowed = "0 or more" if most is None else f"from 0 to {most}"
            raise DagsterInvariantViolationError(
                f"execution: config: {executor}: {name} is {value}; write {allowed} in the run config, or leave it out"
            )


class ThreadedExecutor(Executor):
    """See :func:`threaded_executor`.

    Args:
        in_process: Dagster's in-process executor of the same config, which reads the retries and dependencies.
    """

    def __init__(
        self, *, in_process: Executor, max_concurrent: int, tag_concurrency_limits: list[dict[str, Any]]
    ) -> None:
        self._in_process = in_process
        self._max_concurrent = max_concurrent
        self._tag_concurrency_limits = tag_concurrency_limits

    @property
    def retries(self) -> Any:
        """The retry mode of the run."""
        return self._in_process.retries

    @property
    def step_dependency_config(self) -> Any:
        """The outputs that a step waits for."""
        return self._in_process.step_dependency_config

    def execute(self, plan_context: Any, execution_plan: Any) -> Iterator[DagsterEvent]:
        """Runs the steps of a run.

        Raises:
            DagsterInvariantViolationError: the run's process was lost, and Dagster asks to resume it.
        """
        if plan_context.resume_from_failure:  # the steps that had begun are no longer known
            raise DagsterInvariantViolationError(
                "the threaded executor cannot go on with a run whose process was lost; set max_resume_run_attempts "
                "of run_monitoring in dagster.yaml to 0: recovery starts another run, which goes on"
            )
        plan_context.log.info(f"Executing steps on {self._max_concurrent} threads of one process (pid: {os.getpid()})")
        yield from ExecuteRunWithPlanIterable(
            execution_plan=plan_context.execution_plan,
            iterator=self._steps,
            execution_context_manager=PlanExecutionContextManager(
                job=plan_context.job,
                retry_mode=plan_context.retry_mode,
                execution_plan=plan_context.execution_plan,
                run_config=plan_context.run_config,
                dagster_run=plan_context.dagster_run,
                instance=plan_context.instance,
                raise_on_error=plan_context.raise_on_error,
                output_capture=plan_context.output_capture,
                step_dependency_config=self.step_dependency_config,
            ),
        )

    def _steps(self, job_context: Any, execution_plan: Any) -> Iterator[DagsterEvent]:
        with (
            InstanceConcurrencyContext(job_context.instance, job_context.dagster_run) as pools,
            execution_plan.start(
                retry_mode=job_context.retry_mode,
                max_concurrent=self._max_concurrent,
                tag_concurrency_limits=self._tag_concurrency_limits,
                instance_concurrency_context=pools,
                step_dependency_config=self.step_dependency_config,
            ) as active,
        ):
            keys = [step.key for step in execution_plan.get_steps_to_execute_in_topo_order()]
            manager = job_context.instance.compute_log_manager
            log_key = manager.build_log_key_for_run(job_context.run_id, uuid.uuid4().hex[:8])
            capture = ExitStack()  # of all steps in one file; if it fails, they run without it
            try:
                try:
                    captured = capture.enter_context(manager.capture_logs(log_key))
                    yield DagsterEvent.capture_logs(job_context, keys, log_key, captured)
                except Exception:
                    job_context.log.warning("the output of the steps is not captured", exc_info=True)
                yield from _Threads(job_context, active).run()
            finally:
                try:
                    capture.close()  # without an error: the output of an interrupted run is complete too
                except Exception:
                    job_context.log.warning("the captured output of the steps is not complete", exc_info=True)


@dataclass(slots=True)
class _Step:
    """A step that runs.

    Attributes:
        thread: while the step may be interrupted.
        error: of the whole run, known when the thread has ended.
    """

    context: Any
    events: list[DagsterEvent] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    thread: int | None = None
    interrupted_at: float = -INTERRUPT_SECONDS
    error: BaseException | None = None


class _Threads:
    """The steps of one run: starts those that are ready, and takes their events one by one."""

    def __init__(self, job_context: Any, active: Any) -> None:
        self._job_context = job_context
        self._active = active
        self._running: dict[str, _Step] = {}
        # None: the thread has ended
        self._events: queue.SimpleQueue[tuple[_Step, DagsterEvent | None]] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._stopping_since: float | None = None

    def run(self) -> Iterator[DagsterEvent]:
        active = self._active
        try:
            while self._running or not (self._stopping_since is not None or active.is_complete):
                if active.check_for_interrupts():
                    self._error = DagsterExecutionInterruptedError()
                    active.mark_interrupted()
                    self._stopping_since = time.monotonic()
                    names = ", ".join(self._running) or "no step"
                    self._job_context.log.info(f"received a termination signal, which interrupts {names}")
                if self._stopping_since is None:
                    self._start_ready()
                    yield from active.concurrency_event_iterator(self._job_context)
                elif not self._wait_on():
                    break
                yield from self._next_events()
                if self._stopping_since is None:
                    yield from active.plan_events_iterator(self._job_context)
        finally:
            if self._stopping_since is None and self._running:  # the reader of the events has stopped
                self._stopping_since = time.monotonic()
                while self._running and self._wait_on():
                    for _ in self._next_events():
                        pass
        if self._error is not None:
            raise self._error

    def _start_ready(self) -> None:
        for step in self._active.get_steps_to_execute():
            started = _Step(self._job_context.for_step(step, self._active.get_known_state()))
            self._running[step.key] = started
            body = contextvars.copy_context().run
            threading.Thread(target=body, args=(self._work, started), name=f"step {step.key}", daemon=True).start()

    def _work(self, step: _Step) -> None:
        """Runs on a step's thread. An interrupt arrives inside ``try``; none comes once the step has no thread."""
        try:
            try:
                step.thread = threading.get_ident()
                for event in dagster_event_sequence_for_step(step.context):
                    self._events.put((step, event))
            except BaseException as raised:
                step.error = raised
            with step.lock:
                step.thread = None
            let_arrive()
        except BaseException as late:
            step.error = step.error or late
            with step.lock:
                step.thread = None
        self._events.put((step, None))

    def _next_events(self) -> Iterator[DagsterEvent]:
        """Yields the next event of the threads, if there is one soon."""
        pause = min(POLL_SECONDS, self._active.sleep_interval() or POLL_SECONDS)
        try:
            step, event = self._events.get(timeout=max(pause, 0.001))
        except queue.Empty:
            return
        if event is None:
            yield from self._ended(step)
            return
        step.events.append(event)
        yield event
        self._active.handle_event(event)

    def _ended(self, step: _Step) -> Iterator[DagsterEvent]:
        key = step.context.step.key
        if self._running.get(key) is step:  # else it is tried again, and its next try has begun
            del self._running[key]
            self._active.verify_complete(self._job_context, key)
        if step.error is not None:
            self._error = self._error or step.error
            if self._stopping_since is None:
                self._stopping_since = time.monotonic()
        else:
            yield from _trigger_hook(step.context, step.events)

    def _wait_on(self) -> bool:
        """Interrupts the steps that still run; returns False after their grace period."""
        now = time.monotonic()
        stopping = now - (self._stopping_since or now)
        if stopping > GRACE_SECONDS:
            return False
        for step in self._running.values():
            with step.lock:
                if step.thread is not None and now >= step.interrupted_at + INTERRUPT_SECONDS:
                    sent = interrupt(
                        step.thread,
                        _Threads._work.__code__,
                        everywhere=stopping > GENTLE_SECONDS,
                        error=DagsterExecutionInterruptedError,
                    )
                    step.interrupted_at = now if sent else step.interrupted_at
        return True
