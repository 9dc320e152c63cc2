"""Fan-outs whose process is killed while commands are issued and run: every item is done once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.cli.conftest import Cli
from tests.cli.kills import killed_at
from tests.playbooks import text_of

ITEMS = 1_300
FANOUT = text_of(
    "items",
    f"""
    workflow:
      - step: fan
        loop: {{in: "{{{{ range({ITEMS}) }}}}", iterator: n}}
        spec: {{loop_mode: fanout}}
        tool: {{kind: python, input: {{n: "{{{{ n }}}}"}}, code: "result = {{'n': n}}"}}
        SINK
    """,
)
SINK = "sink: {tool: postgres, auth: pg, table: target}"
COUNTS = """
SELECT event_type, count(*), count(DISTINCT current_index) AS items FROM noetl.event
WHERE execution_id = $1 AND event_type IN ('loop.shard.enqueued', 'command.issued', 'loop.shard.done') GROUP BY 1
"""


@pytest.mark.parametrize(
    ("type_", "item", "sink", "processes"),
    [
        pytest.param("command.issued", 0, "", 1, id="before the first command"),
        pytest.param("command.issued", 700, "", 2, id="while others run"),
        pytest.param("loop.shard.done", 450, "", 1, id="with the first ones done"),
        pytest.param("loop.shard.done", 450, SINK, 2, id="in the transaction of a sink"),
    ],
)
async def test_each_item_is_done_once(
    type_: str,
    item: int,
    sink: str,
    processes: int,
    cli: Cli,
    environment: dict[str, str],
    pool: asyncpg.Pool[Any],
    tmp_path: Path,
) -> None:
    environment |= {"NOETL_DEFAULT_POSTGRES_CREDENTIAL": "embedded", "NOETL_RUN_PROCESSES": str(processes)}
    await pool.execute("CREATE TABLE target (n int)")
    file = tmp_path / "items.yaml"
    file.write_text(FANOUT.replace("SINK", sink))
    condition = f"NEW.event_type = '{type_}' AND NEW.current_index = {item}"
    await killed_at(condition, ["run", str(file)], environment, tmp_path, pool)
    execution_id = await pool.fetchval("SELECT max(execution_id) FROM noetl.event")
    resumed = await asyncio.to_thread(cli, "resume", str(execution_id), "--json")
    assert json.loads(resumed.stdout)["status"] == "COMPLETED", resumed.stderr
    counts = {row["event_type"]: (row["count"], row["items"]) for row in await pool.fetch(COUNTS, execution_id)}
    done = ("command.issued", "loop.shard.done", "loop.shard.enqueued")
    assert counts == dict.fromkeys(done, (ITEMS, ITEMS))
    if sink:
        rows = await pool.fetch("SELECT n FROM target ORDER BY n")
        assert [row["n"] for row in rows] == list(range(ITEMS))
