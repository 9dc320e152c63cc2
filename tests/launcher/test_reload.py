"""A playbook is edited and its code location reloaded: the change is seen, and what runs keeps its text."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from dagster import AssetKey, DagsterRunStatus
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import ModuleTarget

from noetl_dagster.compiler.names import LOCATION
from noetl_dagster.compiler.runs import EXECUTION_TAG, RESUME_EPOCH_TAG
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.settings import Settings
from tests.launcher.conftest import Place, Placed
from tests.launcher.test_runs import execution_of
from tests.waiting import ended, until_now

LATER = '  - step: finish\n    tool: {kind: python, input: {n: "{{ start.word }}"}, code: "result = n"}\n'
CHECKED = (
    '  - step: finish\n    checks: [{name: said, when: "{{ output }}"}]\n'
    '    tool: {kind: python, input: {n: "{{ start.word }}"}, code: "result = \'changed\'"}\n'
    "    next: [more]\n"
    "  - step: more\n    tool: {kind: noop}\n"
)


def edit(place: Place) -> None:
    """Another last step, a check, and another code of the step that is still to come."""
    path = place.playbooks / "gated.yaml"
    text = path.read_text()
    assert LATER in text
    path.write_text(text.replace(LATER, CHECKED))


@contextmanager
def workspace(place: Place) -> Iterator[WorkspaceProcessContext]:
    """Dagster's workspace, as the UI has it, with the code location in a server of its own."""
    target = ModuleTarget(LOCATION, attribute=None, working_directory=None, location_name=LOCATION)
    with WorkspaceProcessContext(place.instance, target) as opened:
        yield opened


def shown(opened: WorkspaceProcessContext) -> tuple[set[str], set[str]]:
    """The assets and checks of the playbook that Dagster shows."""
    graph = opened.create_request_context().asset_graph
    keys = {key.path[-1] for key in graph.get_all_asset_keys() if key.path[:-1] == ["tests", "gated"]}
    return keys, {key.name for key in graph.asset_check_keys}


def state(settings: Settings, execution_id: int) -> ExecutionState:
    async def read() -> ExecutionState:
        engine = await Engine.open(settings)
        try:
            return (await engine.runtime.load(execution_id)).state
        finally:
            await engine.close()

    return run_sync(read())


def test_a_run_ends_with_the_text_that_it_began_with(placed: Placed) -> None:
    """So does one that resumes an execution. A run that begins later has the new text."""
    with placed(runs_at_once=3) as place, workspace(place) as opened:
        assert shown(opened) == ({"start", "finish"}, set())
        running, killed = place.launch(), place.launch("killed")
        place.begun()
        driver = place.begun("killed")
        execution_id = execution_of(place, killed)
        os.kill(driver, signal.SIGKILL)
        until_now(lambda: ended(driver))
        place.until(killed, DagsterRunStatus.FAILURE)
        edit(place)
        opened.reload_code_location(LOCATION)
        assert shown(opened) == ({"start", "finish", "more"}, {"said"})
        place.open_gate()
        # as the recovery sensor asks for it
        resuming = place.launch(tags={EXECUTION_TAG: str(execution_id), RESUME_EPOCH_TAG: "2"})
        for run_id in (running, resuming):
            place.until(run_id, DagsterRunStatus.SUCCESS)
        for one in (execution_of(place, running), execution_id):
            found = state(place.settings, one)
            assert (found.status, found.latest["finish"].envelope["data"]) == ("COMPLETED", "first")
            assert "more" not in found.latest

        after = place.launch("after")
        place.until(after, DagsterRunStatus.SUCCESS)
        found = state(place.settings, execution_of(place, after))
        assert found.latest["finish"].envelope["data"] == "changed"
        assert "more" in found.latest
        key = AssetKey(["tests", "gated", "more"])
        assert place.instance.get_latest_materialization_event(key) is not None
