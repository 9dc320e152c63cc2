"""Calls of the spark tool over the process's one Spark session."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from pyspark.sql import SparkSession

from noetl_dagster.playbook.models import ResultSpec, Task, TaskSpec
from noetl_dagster.result_ref import ResultRef
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.spark.sessions import SparkSessions
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.tools.access.clients import Clients
from noetl_dagster.tools.access.credentials import Credentials
from noetl_dagster.tools.base import ToolCall, ToolContext, ToolResult
from noetl_dagster.tools.spark.tool import SparkTool
from tests.tools.chunk_log import NoLog

Run = Callable[..., Awaitable[ToolResult]]


@pytest.fixture
def spark(sessions: SparkSessions) -> SparkSession:
    return sessions.get()


@pytest.fixture
async def box(settings: Settings, pool: asyncpg.Pool, sessions: SparkSessions) -> AsyncIterator[ToolContext]:
    clients = Clients(settings)
    async with ResultStore(settings, pool) as results:
        yield NoLog().toolbox(settings, results, Credentials(settings, pool), clients, sessions.get)
    await clients.close()


async def put(box: ToolContext, value: object, name: str, tier: StoreTier = StoreTier.MINIO, **spec: Any) -> ResultRef:
    """Stores a value as a result of step ``made``."""
    stored = ResultSpec(store=tier, **spec)
    return await box.results.put(value, execution_id=1, step="made", name=name, spec=stored)


@pytest.fixture
def run(box: ToolContext, tmp_path: Path) -> Run:
    """Runs one call: ``await run(function="file.py:name", input={...})``; ``result`` is the task's spec."""
    tool, executions = SparkTool(), itertools.count(1)

    async def run_tool(
        *,
        input: dict[str, Any] | None = None,
        result: ResultSpec | None = None,
        scope: dict[str, Any] | None = None,
        **config: Any,
    ) -> ToolResult:
        spec = TaskSpec(result=result or ResultSpec())
        task = Task(name="work", kind="spark", config=config, spec=spec)
        execution = next(executions)
        # Spark adds up what it counts of a group, and tests share its session
        call = ToolCall(
            execution,
            "crunch",
            task,
            config,
            input or {},
            scope=scope or {},
            folder=str(tmp_path),
            command_id=uuid4().hex,
        )
        return await tool.run(call, box)

    return run_tool
