"""Dagster runs of an execution."""

from __future__ import annotations

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from noetl_dagster.compiler.attach import EXECUTION_TAG

_ENDED = frozenset({DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED})


def latest_run(instance: DagsterInstance, execution_id: int) -> DagsterRun | None:
    """The newest run that drove an execution."""
    runs = instance.get_runs(RunsFilter(tags={EXECUTION_TAG: str(execution_id)}), limit=1)
    return next(iter(runs), None)


def bury(instance: DagsterInstance, run: DagsterRun) -> None:
    """Reports a run as failed whose process is gone, so that Dagster stops waiting for it."""
    current = instance.get_run_by_id(run.run_id)
    if current is not None and current.status not in _ENDED:
        instance.report_run_failed(
            current, "the process of this run ended without a word; its execution goes on in a new run"
        )
