"""Executions whose driver is killed around the checks of a step and what it reads: said once, read as settled."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from dagster import DagsterEventType, DagsterInstance, EventRecordsFilter

from noetl_dagster import embedded
from noetl_dagster.engine.engine import Engine
from noetl_dagster.settings import Settings
from tests.cli.conftest import Cli
from tests.drivers import killed_at
from tests.playbooks import playbook

MAKER = playbook(
    """
    workload: {value: 1}
    workflow:
      - step: start
        tool: {kind: python, input: {value: "{{ value }}"}, code: "result = [{'value': value}]"}
    """,
    "maker",
)
CHECKED = playbook(
    """
    workload: {ledger: ""}
    workflow:
      - step: start
        from: {rows: tests/maker/start}
        checks:
          - {name: few, row_count: {max: 3}}
          - {name: large, when: "{{ output[0].value > 100 }}", severity: warn}
          - {unique: value, blocking: true}
        tool:
          kind: python
          input: {rows: "{{ rows }}", ledger: "{{ ledger }}"}
          code: |
            import os
            with open(ledger, "a") as file:
                file.write(f"{os.getpid()}\\n")
            result = [{"value": row["value"] * 10} for row in rows]
        next: [last]
      - step: last
        tool: {kind: python, input: {rows: "{{ start }}"}, code: "result = rows[0]['value']"}
    """,
    "checked",
)
CHECKS = {"few": "PASSED", "large": "FAILED", "unique_value": "PASSED"}


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param(True, id="the checks were written, but not the end of the step with them"),
        pytest.param(False, id="checks and end came into the log after their process had died"),
    ],
)
async def test_a_run_that_is_killed(
    lost: bool,
    cli: Cli,
    settings: Settings,
    pool: asyncpg.Pool[Any],
    tmp_path: Path,
) -> None:
    engine, ledger = await Engine.open(settings), tmp_path / "ledger.txt"
    await engine.run(MAKER)
    execution_id = (await engine.lifecycle.create(CHECKED, {"ledger": str(ledger)})).id
    async for _ in killed_at(
        ["NEW.event_type = 'step.exit' AND NEW.node_name = 'start'"], settings, execution_id, tmp_path, pool, lost=lost
    ):
        assert len(await _checks(pool)) == (0 if lost else len(CHECKS)), "all or none"
    settled = await _reads(pool, execution_id)
    assert settled[-1]["rows"]["result"]["data"] == [{"value": 1}]
    await engine.run(MAKER, {"value": 50})
    await engine.close()

    ran = await asyncio.to_thread(cli, "resume", str(execution_id), "--json")
    assert ran.returncode == 0, ran.stderr
    overview = json.loads(ran.stdout)

    assert {one["name"]: one["passed"] for one in overview["steps"][0]["checks"]} == {
        name: status == "PASSED" for name, status in CHECKS.items()
    }
    assert Counter(await _checks(pool)) == Counter(CHECKS.items()), "each exactly once"
    assert len({json.dumps(reads, sort_keys=True) for reads in await _reads(pool, execution_id)}) == 1
    result = "SELECT result -> 'data' FROM noetl.event WHERE event_type = 'step.exit' AND node_name = $1 AND execution_id = $2"
    assert await pool.fetchval(result, "start", execution_id) == [{"value": 10}]
    assert await pool.fetchval(result, "last", execution_id) == 10
    assert len(ledger.read_text().split()) == 1, "what had a result was not run again"
    assert _shown(settings) == Counter(list(CHECKS))


async def _checks(pool: asyncpg.Pool[Any]) -> list[tuple[str, str]]:
    rows = await pool.fetch(
        "SELECT meta ->> 'check' AS name, status FROM noetl.event WHERE event_type = 'check.evaluated'"
    )
    return [(row["name"], row["status"]) for row in rows]


async def _reads(pool: asyncpg.Pool[Any], execution_id: int) -> list[dict[str, Any]]:
    """What each entry of the step has settled on."""
    rows = await pool.fetch(
        "SELECT context -> 'reads' AS reads FROM noetl.event "
        "WHERE execution_id = $1 AND event_type = 'step.enter' AND node_name = 'start' ORDER BY event_id",
        execution_id,
    )
    return [row["reads"] for row in rows]


def _shown(settings: Settings) -> Counter[str]:
    """The evaluations of each check that Dagster knows of."""
    with DagsterInstance.from_config(str(embedded.dagster_home(settings))) as instance:
        records = instance.get_event_records(EventRecordsFilter(DagsterEventType.ASSET_CHECK_EVALUATION))
        events = [record.event_log_entry.dagster_event for record in records]
        return Counter(one.asset_check_evaluation_data.check_name for one in events if one is not None)
