"""Any valid playbook compiles, and its run comes to what the reference interpreter says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from noetl_dagster.compiler.job import compile_playbook
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionState, ExecutionStatus
from noetl_dagster.events.types import EventType
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.settings import Settings

from .generated import WORDS, Words, as_yaml, playbooks
from .reference import Reference, Step

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def quiet_engine(module_settings: Settings) -> Iterator[Engine]:
    engine = run_sync(Engine.open(module_settings))
    yield engine
    run_sync(engine.close())


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=playbooks(), words=WORDS)
def test_a_run_comes_to_what_the_playbook_means(steps: tuple[Step, ...], words: Words, quiet_engine: Engine) -> None:
    text = as_yaml(steps, words)
    expected = Reference(steps).run()
    state = run_sync(quiet_engine.run(parse_playbook(text)))
    wanted = ExecutionStatus.FAILED if expected.failed else ExecutionStatus.COMPLETED
    assert state.status is wanted, (state.error, text)
    assert state.visits == expected.visits, text
    assert state.ctx == expected.ctx, text
    for step, output in expected.outputs.items():
        envelope = state.latest[step].envelope
        results = envelope.get("results")
        found = [item["data"] for item in results] if results is not None else envelope.get("data")
        assert found == output or state.latest[step].error, text
    run_sync(_in_order(quiet_engine, state))


async def _in_order(engine: Engine, state: ExecutionState) -> None:
    """A step is entered only after the steps whose arcs fired into it have ended."""
    entered: dict[str, list[int]] = {}
    async for event in engine.runtime.log.events(state.execution_id):
        if event.event_type == EventType.STEP_ENTER:
            entered.setdefault(event.node_name or "", []).append(event.event_id)
    for end in state.ends.values():
        for target in end.fired:
            later = [moment for moment in entered.get(target, []) if moment > end.event_id]
            assert later or state.status is ExecutionStatus.FAILED, (end.step, target)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=playbooks(), words=WORDS)
def test_any_playbook_compiles(steps: tuple[Step, ...], words: Words) -> None:
    compile_playbook(parse_playbook(as_yaml(steps, words)))
