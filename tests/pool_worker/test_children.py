"""A child playbook is driven where its parent is; the child's own steps go to the pool where they say so."""

from __future__ import annotations

from pathlib import Path

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.settings import Settings
from tests.playbooks import playbook, text_of
from tests.pool import working

CHILD = text_of(
    "child",
    """
    workload: {n: 0}
    workflow:
      - step: start
        spec: {dispatch: workers}
        tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n * n"}
    """,
)
PARENT = """
workflow:
  - step: start
    spec: {dispatch: workers}
    loop: {in: [1, 2, 3], iterator: n, mode: parallel}
    tool: {kind: playbook, path: tests/child, input: {n: "{{ n }}"}}
    next: [end]
  - step: end
    tool: {kind: python, input: {found: "{{ start.results }}"}, code: "result = found"}
"""
CLAIMS = "SELECT execution_id, worker_id FROM noetl.event WHERE event_type = 'command.claimed'"


async def test_a_child_stays_and_its_steps_go(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "child.yaml").write_text(CHILD)
    own = settings.model_copy(update={"playbooks_path": tmp_path})
    engine = await Engine.open(own)
    async with working(own, "w1"):
        state = await engine.run(playbook(PARENT))
    assert state.status is ExecutionStatus.COMPLETED, state.error
    assert state.latest["end"].envelope["data"] == [1, 4, 9]
    claims = await engine.runtime.pool.fetch(CLAIMS)
    await engine.close()
    in_pool = [row["execution_id"] for row in claims if row["worker_id"] == "w1"]
    assert len(set(in_pool)) == len(in_pool) == 3, "one command of each child"
    assert state.execution_id not in in_pool
    assert len(claims) == 7
