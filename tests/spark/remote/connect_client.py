"""What the tests run over Spark Connect, in a process of its own: PySpark has either a JVM or a connection.

python -m tests.spark.remote.connect_client <settings as JSON>
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from dagster import asset, materialize

from noetl_dagster.engine.engine import Engine
from noetl_dagster.errors import ToolError
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.models import Task
from noetl_dagster.resources.spark import PySparkResource
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import Settings, StoreTier, load_settings
from noetl_dagster.spark.sessions import SparkSessions, is_classic
from noetl_dagster.tools.base import ToolCall, ToolResult
from noetl_dagster.tools.spark.tool import SparkTool
from tests.playbooks import text_of
from tests.waiting import until

PLAYBOOK = text_of(
    "remote",
    """
    workflow:
      - step: start
        tool:
          kind: spark
          sql: SELECT id AS n, id % 3 AS part FROM range(30)
          partition_by: part
          tier: minio
        next: [fan]
      - step: fan
        loop: {in: "{{ range(20) | list }}", iterator: n}
        spec: {loop_mode: fanout, fanout: {engine: spark}}
        tool: {kind: python, input: {n: "{{ n }}"}, code: "result = n"}
        next: [total]
      - step: total
        tool:
          kind: spark
          from: [start]
          sql: SELECT count(*) AS rows, sum(n) AS total, count(DISTINCT part) AS parts FROM start
          collect: true
    """,
)

SLOW = """
from pyspark.sql import functions as F

def main(spark):
    def wait(n):
        import time
        time.sleep(120)
        return n
    return spark.range(0, 1, 1, 1).select(F.udf(wait, "long")("id"))
"""


def use_the_resource(remote: str) -> None:
    @asset
    def totals(pyspark: PySparkResource) -> int:
        assert not is_classic(pyspark.spark_session)
        return pyspark.spark_session.range(4).count()

    done = materialize([totals], resources={"pyspark": PySparkResource(remote=remote)})
    assert done.output_for_node("totals") == 4


async def call(engine: Engine, *, input: dict[str, Any] | None = None, **config: Any) -> ToolResult:
    task = Task(name="work", kind="spark", config=config)
    return await SparkTool().run(
        ToolCall(1, "crunch", task, config, input or {}, command_id=str(len(config))), engine.runtime.tool_context
    )


async def use_the_tool(engine: Engine) -> None:
    """Results of several tiers, views of two calls at once, errors, progress and cancellation."""
    store, told = engine.runtime.results, list[str]()
    engine.runtime.tool_context.progress = lambda call, message: told.append(message)
    refs = [
        await store.put([{"n": number}], execution_id=1, step="made", name=tier.value, tier=tier)
        for number, tier in enumerate((StoreTier.MINIO, StoreTier.PVC, StoreTier.DB, StoreTier.KV))
    ]
    query = "SELECT sum(n) AS s FROM rows"
    both = await asyncio.gather(
        call(engine, command=query, input={"rows": refs}, collect=True),
        call(engine, command=query, input={"rows": [{"n": 50}]}, collect=True, params={"unused": 1}),
    )
    assert [done.data["rows"] for done in both] == [[{"s": 6}], [{"s": 50}]]
    made = await call(engine, code="result = {'a': spark.range(4), 'b': 1}")
    assert made.data["b"] == 1
    assert ResultRef.model_validate(made.data["a"]).rows == 4
    with pytest.raises(ToolError, match="UNRESOLVED_COLUMN") as caught:
        await call(engine, command="SELECT nme FROM rows", input={"rows": [{"name": "Ada"}]})
    assert len(str(caught.value)) < 700
    running = asyncio.create_task(call(engine, code=SLOW))
    await until(lambda: running.done() or [line for line in told if "0/1 tasks" in line], "progress")
    running.cancel()
    ended = await asyncio.wait_for(asyncio.gather(running, return_exceptions=True), 90)
    assert isinstance(ended[0], asyncio.CancelledError), ended


async def main(settings: Settings) -> None:
    sessions = SparkSessions(settings)
    engine = await Engine.open(settings, spark=sessions.get)
    try:
        state: ExecutionState = await engine.run(parse_playbook(PLAYBOOK, file="remote.yaml"))
        assert state.status == "COMPLETED", state.error
        assert state.latest["total"].envelope["data"]["rows"] == [{"rows": 30, "total": 435, "parts": 3}]
        assert state.latest["fan"].envelope["done"] == 20
        await use_the_tool(engine)
    finally:
        await engine.close()
        sessions.stop()


if __name__ == "__main__":
    given = load_settings(sys.argv[1])
    assert given.spark_remote is not None
    use_the_resource(given.spark_remote)
    asyncio.run(main(given))
    print("ok")
