"""Dagster runs of an execution."""

from __future__ import annotations

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from noetl_dagster.compiler.attach import EXECUTION_TAG, ending_among_others

_ENDED = frozenset({DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED})


def latest_run(instance: DagsterInstance, execution_id: int, playbook: str) -> DagsterRun | None:
    """The newest run that drove an execution.

    Args:
        playbook: its name; a run over the assets of several has an execution of each.
    """
    for ending in ("", ending_among_others(playbook)):
        wanted = RunsFilter(tags={f"{EXECUTION_TAG}{ending}": str(execution_id)})
        runs = instance.get_runs(wanted, limit=1)
        if runs:
            return runs[0]
    return None


def bury(instance: DagsterInstance, run: DagsterRun) -> None:
    """Reports a run as failed whose process is gone, so that Dagster stops waiting for it."""
    current = instance.get_run_by_id(run.run_id)
    if current is not None and current.status not in _ENDED:
        instance.report_run_failed(
            current, "the process of this run ended without a word; its execution goes on in a new run"
        )
