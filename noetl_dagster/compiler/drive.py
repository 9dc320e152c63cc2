"""Runs a coroutine of the engine for an op: progress to the run's log, and termination to the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeVar

from dagster import DagsterExecutionInterruptedError, DagsterRunStatus, OpExecutionContext

from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.progress import loop_progress
from noetl_dagster.errors import ExecutionCancelledError
from noetl_dagster.storage.loop import background_loop, run_sync

T = TypeVar("T")

REPORT_SECONDS = 5.0
_TERMINATED = frozenset({DagsterRunStatus.CANCELING, DagsterRunStatus.CANCELED})


def drive(
    context: OpExecutionContext, engine: Engine, work: Coroutine[Any, Any, T], *, execution_id: int, step: str
) -> T:
    """Waits for ``work``; every few seconds the counts of the step's loop go to the run's log.

    When the run is terminated the work is cancelled, and so is the execution.
    """
    future: Future[T] = asyncio.run_coroutine_threadsafe(work, background_loop())
    started = time.monotonic()
    try:
        while True:
            try:
                return future.result(REPORT_SECONDS)
            except NotYet:
                if future.done():  # the work itself timed out
                    raise
                _report(context, engine, execution_id, step, time.monotonic() - started)
    except ExecutionCancelledError as error:
        # a run that is being cancelled ends as cancelled, any other interrupted one as failed
        context.instance.report_run_canceling(context.run, message=str(error))
        raise DagsterExecutionInterruptedError(str(error)) from error
    except CancelledError:
        raise asyncio.CancelledError from None
    except BaseException:
        if not future.done():
            future.cancel()
            _cancel_if_terminated(context, engine, execution_id)
        raise


def _report(
    context: OpExecutionContext, engine: Engine, execution_id: int, step: str, seconds: float
) -> None:
    for progress in run_sync(loop_progress(engine.runtime.pool, execution_id)):
        if progress.step == step and progress.ended < progress.total:
            context.log.info(f"{progress} after {seconds:.0f} s")


def _cancel_if_terminated(context: OpExecutionContext, engine: Engine, execution_id: int) -> None:
    """A terminated run ends its execution; one whose process is merely stopped leaves it to be resumed."""
    run = context.instance.get_run_by_id(context.run_id)
    if run is not None and run.status in _TERMINATED:
        run_sync(engine.lifecycle.cancel(execution_id, f"Dagster run {context.run_id} was terminated"))
