"""Runs a coroutine of the engine for an op: progress to the run's log, and termination to the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from typing import Any, TypeVar

from dagster import DagsterExecutionInterruptedError, DagsterRunStatus, OpExecutionContext

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.executions.progress import (
    LoopProgress,
    Pace,
    loop_progress,
    running_notes,
    stream_progress,
)
from noetl_dagster.errors import ExecutionCancelledError
from noetl_dagster.process.event_loop import background_loop, run_sync

T = TypeVar("T")

WAKE_SECONDS = 0.5
END_SECONDS = 5.0
REPORT_SECONDS = 5.0
COUNTING_SHARE = 30
PROGRESS_TAG = "noetl/progress"
TAG_CHARACTERS = 200
_TERMINATED = frozenset({DagsterRunStatus.CANCELING, DagsterRunStatus.CANCELED})


def drive(
    context: OpExecutionContext,
    engine: Engine,
    work: Coroutine[Any, Any, T],
    *,
    execution_id: int,
    step: str,
    stream: Sequence[str] = (),
) -> T:
    """Waits for ``work``; every few seconds the counts of the step's loop go to the run's log and tags.

    Args:
        stream: the steps that are walked side by side, from the source on; then the counts of their chunks.

    When the run is terminated the work is cancelled, and so is the execution.
    """
    future: Future[T] = asyncio.run_coroutine_threadsafe(work, background_loop())
    reporter = _ProgressReporter(context, engine, execution_id, step, stream)
    try:
        while True:
            try:
                result = future.result(WAKE_SECONDS)  # a thread that waits longer hears no termination
            except NotYet:
                if future.done():  # the work itself timed out
                    raise
                reporter.report_when_due()
            else:
                reporter.finish()
                return result
    except ExecutionCancelledError as error:
        # a run that is being cancelled ends as cancelled, any other interrupted one as failed
        context.instance.report_run_canceling(context.run, message=str(error))
        raise DagsterExecutionInterruptedError(str(error)) from error
    except CancelledError:
        raise asyncio.CancelledError from None
    except BaseException:
        if not future.done():
            try:
                # first, so that the work finds in the log why it ends
                if _cancel_if_terminated(context, engine, execution_id):
                    _await_cleanup(future)
            finally:
                future.cancel()
        raise


class _ProgressReporter:
    """Reports the progress of a step, its loop and its tools: in the run's log, and in a tag on the run's page."""

    def __init__(
        self,
        context: OpExecutionContext,
        engine: Engine,
        execution_id: int,
        step: str,
        stream: Sequence[str],
    ) -> None:
        self._stream = stream
        self._context = context
        self._engine = engine
        self._execution_id = execution_id
        self._step = step
        self._pace = Pace()
        self._started = time.monotonic()
        self._reported = ""
        self._due = self._started + REPORT_SECONDS
        self._warned: str | None = None

    def report_when_due(self) -> None:
        if time.monotonic() >= self._due:
            self.report()

    def finish(self) -> None:
        """Reports the end if anything was reported before, since the tag outlives the work."""
        if self._reported or self._stream:
            self.report()

    def _warn_of_pool(self) -> None:
        """Warns once each time that the pool of the step's commands has no workers."""
        lonely = self._engine.dispatcher.unattended(self._execution_id, self._step)
        if lonely is not None and lonely != self._warned:
            self._context.log.warning(f"step {self._step} waits: {lonely}")
        self._warned = lonely

    def report(self) -> None:
        self._warn_of_pool()
        began = time.monotonic()
        pool = self._engine.runtime.pool
        found = run_sync(loop_progress(pool, self._execution_id))
        note = run_sync(running_notes(pool, self._execution_id)).get(self._step)
        now = time.monotonic()
        # counting takes longer the larger the loop is, and is never more than a few percent of the work
        self._due = now + max(REPORT_SECONDS, COUNTING_SHARE * (now - began))
        mine = [progress for progress in found if progress.step == self._step]
        if self._stream:
            said = run_sync(stream_progress(pool, self._execution_id, self._stream))
        else:
            said = self._describe_loop(mine[-1], now) if mine else f"{self._step}: {note}" if note else ""
        if not said or said == self._reported:
            return
        self._reported = said
        self._context.log.info(f"{said} after {now - self._started:.0f} s")
        tag = _describe_concurrent_loops(found) or said
        self._context.instance.add_run_tags(self._context.run_id, {PROGRESS_TAG: tag[:TAG_CHARACTERS]})

    def _describe_loop(self, progress: LoopProgress, now: float) -> str:
        self._pace.see(progress.ended, now)
        pace = self._pace.describe(progress.total) if progress.ended < progress.total else ""
        return f"{progress}, {pace}" if pace else str(progress)


def _describe_concurrent_loops(found: Sequence[LoopProgress]) -> str:
    """Describes the progress of loops that run at the same time; empty for one alone, which has more detail."""
    running = [progress for progress in found if progress.ended < progress.total]
    if len(running) < 2:
        return ""
    return ", ".join(f"{one.step} {100 * one.ended // one.total} %" for one in running)


def _cancel_if_terminated(context: OpExecutionContext, engine: Engine, execution_id: int) -> bool:
    """A terminated run ends its execution; one whose process is merely stopped leaves it to be resumed."""
    run = context.instance.get_run_by_id(context.run_id)
    if run is None or run.status not in _TERMINATED:
        return False
    run_sync(engine.lifecycle.cancel(execution_id, f"Dagster run {context.run_id} was terminated"))
    return True


def _await_cleanup(work: Future[Any]) -> None:
    """Waits a while for work of a cancelled execution: tools remove what they have started outside."""
    with suppress(NotYet, CancelledError):
        work.exception(END_SECONDS)
