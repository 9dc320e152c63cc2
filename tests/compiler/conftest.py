"""Playbooks run as Dagster jobs on a database of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from dagster import DagsterInstance, ExecuteInProcessResult

from noetl_dagster.compiler.runs import EXECUTION_TAG
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider
from tests.definitions import definitions_of
from tests.playbooks import playbook


@dataclass
class DagsterRunResult:
    """A finished Dagster run and what the log says about its execution."""

    result: ExecuteInProcessResult
    state: ExecutionState


@pytest.fixture
def launch(noetl: EngineProvider, dagster_instance: DagsterInstance) -> Callable[..., DagsterRunResult]:
    """Runs a playbook as its Dagster job in this process."""

    def launch(text: str, **workload: Any) -> DagsterRunResult:
        defs = definitions_of([playbook(text)], noetl)
        job = defs.resolve_job_def("sample")
        config = {"ops": {"sample_playbook": {"config": workload}}} if workload else None
        result = job.execute_in_process(run_config=config, instance=dagster_instance, raise_on_error=False)
        run = dagster_instance.get_run_by_id(result.run_id)
        assert run is not None
        execution_id = int(run.tags[EXECUTION_TAG])
        state = run_sync(noetl.engine().runtime.load(execution_id)).state
        return DagsterRunResult(result, state)

    return launch
