"""The run's process drives an execution too while all that goes on is in pods of its steps."""

from __future__ import annotations

from typing import Any

from noetl_dagster.compiler.attach import ending_of, execution_id_of
from noetl_dagster.compiler.executors.pods import POD_TAG
from noetl_dagster.resources.engines import EngineProvider

NOETL = "noetl"


def hold_execution(context: Any) -> bool:
    """Marks the execution of a step as driven by this process: between two pods nobody else does.

    Args:
        context: of a step that runs in a pod.

    Again for one that is held: its mark comes back after an outage of the database.

    Returns:
        False as long as the step's pod has not started the execution.
    """
    run = context.dagster_run
    execution_id = execution_id_of(context.instance, run, ending_of(run, context.step.tags[POD_TAG]))
    if execution_id is None:
        return False
    noetl: EngineProvider = getattr(context.resources, NOETL)
    noetl.run(noetl.engine().liveness.hold(execution_id))
    return True
