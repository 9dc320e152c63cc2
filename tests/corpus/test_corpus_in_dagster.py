"""Playbooks of the corpus come to the same when they run as Dagster jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dagster import DagsterInstance

from noetl_dagster.compiler.runs import EXECUTION_TAG
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider, close_engines
from noetl_dagster.settings import Settings
from tests.definitions import definitions_of

from .expectation import FOLDER, Expectation

pytestmark = pytest.mark.long

CHOSEN = (
    "cyclic_pagination",
    "data_pipeline",
    "diamond_inside_a_cycle",
    "failure_handled_by_event_name",
    "failure_unhandled",
    "fanout_loop",
    "fanout_partial",
    "inclusive_fan_out_reduce",
    "join_of_unequal_branches_in_a_cycle",
    "join_with_a_dead_branch",
    "keychain_stays_secret",
    "loop_inside_a_cycle",
    "step_scope",
    "sub_playbook_fails",
)


@pytest.fixture(scope="module")
def noetl(corpus_settings: Settings) -> Iterator[EngineProvider]:
    yield EngineProvider(corpus_settings)
    close_engines()


@pytest.fixture(scope="module")
def instance() -> Iterator[DagsterInstance]:
    with DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.mark.parametrize("name", CHOSEN)
def test_its_job_comes_to_the_same(name: str, noetl: EngineProvider, instance: DagsterInstance, api: str) -> None:
    path = FOLDER / f"{name}.yaml"
    expected, playbook = Expectation.of(path), load_playbook(path)
    given = expected.given | ({"api": api} if "api" in playbook.workload else {})
    job = definitions_of([playbook], noetl).resolve_job_def(playbook.name)
    (node,) = job.graph.node_dict
    config = {"ops": {node: {"config": given}}} if given else None
    result = job.execute_in_process(run_config=config, instance=instance, raise_on_error=False)
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    runtime = noetl.engine().runtime
    state = run_sync(runtime.load(int(run.tags[EXECUTION_TAG]))).state
    run_sync(expected.check(state, runtime))
    assert result.success == (expected.status == "COMPLETED")
