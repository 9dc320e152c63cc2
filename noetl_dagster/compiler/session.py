"""One op's work on the execution of its run: it drives the engine, reports progress, and yields the op's outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dagster import (
    AssetCheckResult,
    DagsterExecutionInterruptedError,
    DagsterRunStatus,
    Failure,
    OpExecutionContext,
    Output,
)

from noetl_dagster.compiler.executors.noetl import processes_of, runs_in_one_process
from noetl_dagster.compiler.external_assets import services_of
from noetl_dagster.compiler.names import NOETL, PYSPARK
from noetl_dagster.compiler.pipes import JobReports, open_session
from noetl_dagster.compiler.plan import PlaybookPlan, RegionPlan
from noetl_dagster.compiler.result_metadata import check_facts, place_metadata, step_metadata
from noetl_dagster.compiler.runs import attach, driven_run, finish
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.addresses import execution_url
from noetl_dagster.engine.executions.overview import StepView, chunks_made, loop_progress, overview
from noetl_dagster.engine.executions.progress import running_notes
from noetl_dagster.engine.executions.results import references_of
from noetl_dagster.engine.executions.spark_ahead import prepare_spark
from noetl_dagster.errors import ExecutionCancelledError
from noetl_dagster.events.ids import snowflake_milliseconds
from noetl_dagster.events.state import ExecutionStatus, StepEnd, StepStatus
from noetl_dagster.io_managers.metadata import redacted, redacted_part
from noetl_dagster.playbook.graph import have_same_steps_and_arcs
from noetl_dagster.process.event_loop import background_loop, run_sync
from noetl_dagster.process.logs import LogContext
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings
from noetl_dagster.worker.execution import Execution

WAKE_SECONDS = 0.5
"""A thread that waits longer does not notice a termination."""

END_SECONDS = 5.0
"""Seconds in which the tools of a terminated run may remove what they have started outside."""

REPORT_SECONDS = 5.0
COUNTING_SHARE = 30
"""Counting takes long while the projection is behind: the pause after it is at least this many times as long."""

PROGRESS_TAG = "noetl/progress"
TAG_CHARACTERS = 200
_TERMINATED = frozenset({DagsterRunStatus.CANCELING, DagsterRunStatus.CANCELED})


@dataclass(frozen=True, slots=True)
class OpSession:
    """One op's work on the execution of its run.

    Attributes:
        plan: from which the op was made; the execution keeps the playbook's text with which it began.
        region: the op's steps.
        reports: of the jobs that the run's steps have started.
    """

    context: OpExecutionContext
    engine: Engine
    execution: Execution
    plan: PlaybookPlan
    region: RegionPlan
    reports: JobReports

    @classmethod
    def open(
        cls,
        context: OpExecutionContext,
        plan: PlaybookPlan,
        region: RegionPlan,
        workload: dict[str, Any] | None,
    ) -> OpSession:
        """Attaches to the execution of the op's run, or starts it.

        Args:
            workload: overrides from the run config; None for ops that cannot start an execution.
        """
        resource: EngineProvider = getattr(context.resources, NOETL)
        engine = resource.engine()
        reports = driven_run(context.run, plan).reports
        with LogContext(run_id=context.run_id):
            one_process = runs_in_one_process(context)
            execution = run_sync(attach(engine, context.instance, context.run, plan, region, workload, one_process))
        pyspark = getattr(context.resources, PYSPARK, None)
        execution.services = replace(
            services_of(engine.runtime, context.instance, context),
            spark=None if pyspark is None else lambda: pyspark.spark_session,
            open_pipes=partial(open_session, engine.runtime.tool_context, reports),
            processes=processes_of(context.run.run_config),
        )
        if region.needs_spark and one_process:
            run_sync(prepare_spark(engine.runtime, execution))
        if workload is not None:  # the first op, which is one
            for warning in execution.playbook.main_warnings:
                context.log.warning(warning)
        return cls(context, engine, execution, plan, region, reports)

    @property
    def _settings(self) -> Settings:
        return self.engine.runtime.settings

    @property
    def is_changed(self) -> bool:
        """True if the file has changed since the execution began, so that its steps differ from those of the op."""
        return not have_same_steps_and_arcs(self.execution.playbook, self.plan.playbook)

    def walk(self) -> None:
        """Takes the execution to its end, with the steps that it began with; the ops of this run are not theirs.

        Raises:
            Failure: the execution failed.
        """
        entry = self.execution.playbook.entry.name
        self.context.log.warning(
            f"{self.plan.playbook.file} has other steps now than execution {self.execution.id} began with; "
            "it goes on with those"
        )
        if self.drive(self.engine.walker.run(self.execution), entry) == ExecutionStatus.FAILED:
            ends = self.execution.state.latest.values()
            raise Failure(
                "; ".join(f"step {end.step}: {end.error}" for end in ends if end.unhandled),
                allow_retries=False,
            )

    def drive(self, work: Any, step: str, stream: Sequence[str] = ()) -> Any:
        """Waits for a coroutine of the engine, and reports progress to the run's log and tags meanwhile.

        If the run is terminated, the work is cancelled, and so is the execution.

        Args:
            stream: the steps that are walked side by side, from the source on; progress is that of their chunks.
        """
        reporting = {
            one.step.name: one.key if one.spec is not None else None
            for one in self.region.steps
            if any(task.config.get("pipes") for task in one.step.tasks)
        }
        with (
            LogContext(execution_id=self.execution.id, step=step, run_id=self.context.run_id),
            self.reports.receiving(self.execution.id, self.context, reporting),
        ):
            future = asyncio.run_coroutine_threadsafe(self.engine.guard(self.execution, work), background_loop())
            progress = _ProgressReporter(self, step, stream)
            try:
                while True:
                    try:
                        result = future.result(WAKE_SECONDS)
                    except NotYet:
                        if future.done():  # the work itself timed out
                            raise
                        progress.report_when_due()
                    else:
                        progress.finish()
                        return result
            except ExecutionCancelledError as error:
                # a run that is being cancelled ends as cancelled, any other interrupted one as failed
                self.context.instance.report_run_canceling(self.context.run, message=str(error))
                raise DagsterExecutionInterruptedError(str(error)) from error
            except CancelledError:
                raise asyncio.CancelledError from None
            except BaseException:
                if not future.done():
                    try:
                        if self._cancel_if_terminated():
                            with suppress(NotYet, CancelledError):
                                future.exception(END_SECONDS)
                    finally:
                        future.cancel()
                raise

    def _cancel_if_terminated(self) -> bool:
        """Ends the execution of a terminated run, so that its work finds the reason in the log.

        If the process is merely stopped, the execution can be resumed.
        """
        run = self.context.instance.get_run_by_id(self.context.run_id)
        if run is None or run.status not in _TERMINATED:
            return False
        reason = f"Dagster run {self.context.run_id} was terminated"
        run_sync(self.engine.lifecycle.cancel(self.execution.id, reason))
        return True

    def outputs(
        self, ends: Iterable[StepEnd], fired: Iterable[str], metadata: dict[str, Any] | None = None
    ) -> Iterator[Any]:
        """Yields the results that there are, the outcomes of their checks, and a token for each arc that fired.

        Arcs are named by the steps to which they lead; ``metadata`` is added to that of the results.
        """
        steps = {one.step.name: one for one in self.region.steps}
        for end in ends:
            one = steps[end.step]
            received = self.reports.take(self.execution.id, end.step)
            for event in received.events if received is not None else ():
                self.context.log_event(redacted_part(event))  # type: ignore[arg-type]
            if one.spec is None:
                continue
            if end.status is StepStatus.COMPLETED:
                [reference] = run_sync(references_of(self.engine.runtime, [(self.execution.id, end)]))
                shown = step_metadata(self._settings, self.plan, one, end, self.execution, self.context.log)
                shown |= metadata or {}
                shown |= received.metadata if received is not None else {}
                yield Output(reference, one.result, metadata=redacted(shown))
                if exposed := end.envelope.get("secrets"):
                    self.context.log.warning(f"step {end.step} stores a secret in {', '.join(exposed)}")
            for facts in check_facts(self._settings, one, end, self.execution):
                yield AssetCheckResult(**facts)
        arcs = {target.step.name: target.arc for target in self.region.targets}
        for name in fired:
            yield Output(None, arcs[name])

    def pace(self, end: StepEnd) -> dict[str, Any]:
        """Returns the seconds and the shards per second of the fan-out that has just ended, for its asset."""
        starts = self.execution.state.loops.get((end.step, end.visit))
        if not starts:
            return {}
        seconds = time.time() - snowflake_milliseconds(int(starts[-1].loop_id)) / 1000
        ended = end.envelope.get("done", 0) + end.envelope.get("failed", 0)
        return {"seconds": round(seconds, 3), "shards a second": round(ended / seconds, 1) if seconds > 0 else 0.0}

    def finish(self, ends: Iterable[StepEnd]) -> None:
        """Ends the execution if this was its last step, and fails the op if a failure has no arc.

        Raises:
            Failure: a step failed and no arc handles its failure.
        """
        status = run_sync(finish(self.engine, self.context.run, self.plan, self.region, self.execution.id))
        if status != ExecutionStatus.RUNNING:
            self.context.log.info(
                f"execution {self.execution.id} is {status}: {execution_url(self._settings, self.execution.id)}"
            )
        for end in ends:
            if end.unhandled:
                place = self.execution.playbook.step(end.step).place
                where = f" ({place})" if place is not None else ""
                raise Failure(
                    f"step {end.step}{where}: {end.error}",
                    metadata={
                        **place_metadata(self._settings, self.execution.id, end.step),
                        "error": str(end.envelope.get("error")),
                    },
                    allow_retries=False,
                )


class _ProgressReporter:
    """Reports the progress of a step, its loop and its tools: in the run's log, and in a tag on the run's page."""

    def __init__(self, session: OpSession, step: str, stream: Sequence[str]) -> None:
        self._session = session
        self._step = step
        self._stream = stream
        self._started = time.monotonic()
        self._due = self._started + REPORT_SECONDS
        self._reported = ""
        self._warned: str | None = None

    def report_when_due(self) -> None:
        if time.monotonic() >= self._due:
            self._report()

    def finish(self) -> None:
        """Reports the end if anything was reported before, since the tag outlives the work."""
        if self._reported or self._stream:
            self._report()

    def _report(self) -> None:
        context, engine = self._session.context, self._session.engine
        execution_id = self._session.execution.id
        lonely = engine.dispatcher.unattended(execution_id, self._step)
        if lonely is not None and lonely != self._warned:
            context.log.warning(f"step {self._step} waits: {lonely}")
        self._warned = lonely
        began = time.monotonic()
        steps = run_sync(overview(engine.runtime, execution_id)).steps
        note = run_sync(running_notes(engine.runtime.pool, execution_id)).get(self._step)
        now = time.monotonic()
        self._due = now + max(REPORT_SECONDS, COUNTING_SHARE * (now - began))
        text = f"{self._step}: {note}" if note else ""
        if self._stream:
            text = _describe_stream([one for name in self._stream for one in steps if one.step == name])
        elif (loop := next((one.loop for one in steps if one.step == self._step), None)) is not None:
            text = f"{self._step}: {loop_progress(loop)}"
        if not text or text == self._reported:
            return
        self._reported = text
        context.log.info(f"{text} after {now - self._started:.0f} s")
        tag = _describe_concurrent_loops(steps) or text
        context.instance.add_run_tags(context.run_id, {PROGRESS_TAG: tag[:TAG_CHARACTERS]})


def _describe_stream(steps: Sequence[StepView]) -> str:
    """Describes how many chunks each step of a stream, from its source on, has consumed and made."""
    descriptions = []
    for one in steps:
        parts = []
        if one.loop is not None and one is not steps[0]:
            parts.append(f"took {one.loop.done + one.loop.failed}")
            if one.loop.failed:
                parts.append(f"{one.loop.failed} failed")
        if one.chunks is not None:
            parts.append(f"made {chunks_made(one.chunks)}")
        if parts:
            descriptions.append(f"{one.step}: {', '.join(parts)}")
    return "; ".join(descriptions)


def _describe_concurrent_loops(steps: Sequence[StepView]) -> str:
    """Describes the progress of loops that run at the same time; empty for one alone, which has more detail."""
    ended = {one.step: (one.loop.done + one.loop.failed, one.loop.total) for one in steps if one.loop is not None}
    running = [f"{step} {100 * count // total} %" for step, (count, total) in ended.items() if count < total]
    return ", ".join(running) if len(running) > 1 else ""
