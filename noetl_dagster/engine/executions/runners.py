"""The two ways to drive an execution: in a Dagster run of its own, or by the engine in a process that drives many."""

from __future__ import annotations

from enum import StrEnum

from noetl_dagster.errors import NotDeployedError
from noetl_dagster.playbook.models import Playbook


class Runner(StrEnum):
    """The process that drives an execution.

    Attributes:
        DAGSTER: a Dagster run of its own.
        ENGINE: a process that drives many executions side by side. Dagster receives the assets and checks.
    """

    DAGSTER = "dagster"
    ENGINE = "engine"


def check_runner(playbook: Playbook, runner: Runner) -> None:
    """Checks that a playbook does not need a Dagster run, if it gets none.

    Raises:
        NotDeployedError: it needs one.
    """
    if runner is Runner.DAGSTER:
        return
    for step in playbook.steps:
        reason = ""
        if step.dagster_pool:
            reason = f"takes a slot of Dagster's pool {step.dagster_pool!r}"
        elif any(task.config.get("pipes") for task in step.tasks):
            reason = "has a tool with pipes, which reports to a run"
        if reason:
            raise NotDeployedError(
                f"playbook {playbook.metadata.path!r} needs a Dagster run: step {step.name} {reason}; "
                f"use the runner {Runner.DAGSTER.value!r}"
            )
