"""One Spark session for the whole process: starting one takes seconds."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pyspark.sql import SparkSession

from noetl_dagster.playbook.models import ResultSpec, Task, TaskSpec
from noetl_dagster.settings import Settings
from noetl_dagster.spark.sessions import SparkSessions
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.tools.access.clients import Clients
from noetl_dagster.tools.access.credentials import Credentials
from noetl_dagster.tools.base import Toolbox, ToolCall, ToolResult
from noetl_dagster.tools.spark.tool import SparkTool

Run = Callable[..., Awaitable[ToolResult]]


def aws_environment(settings: Settings) -> dict[str, str]:
    """The AWS environment that leads the s3 tier to the embedded object store."""
    return {
        "AWS_ENDPOINT_URL": settings.minio_endpoint or "",
        "AWS_ACCESS_KEY_ID": settings.minio_access_key,
        "AWS_SECRET_ACCESS_KEY": settings.minio_secret_key.get_secret_value(),
        "AWS_REGION": settings.minio_region,
        "AWS_DEFAULT_REGION": settings.minio_region,
    }


@pytest.fixture(scope="session")
def sessions(services: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSessions]:
    home = tmp_path_factory.mktemp("spark-home")
    own = Settings(
        home=home,
        spark_driver_memory="1g",
        spark_master="local[2]",
        # executors find what the s3 tier needs in their own environment
        spark_config={
            f"spark.executorEnv.{name}": value for name, value in aws_environment(services).items()
        },
    )
    owner = SparkSessions(own)
    yield owner
    owner.stop()


@pytest.fixture
def spark(sessions: SparkSessions) -> SparkSession:
    return sessions.get()


@pytest.fixture
async def box(settings: Settings, pool: asyncpg.Pool, sessions: SparkSessions) -> AsyncIterator[Toolbox]:
    clients = Clients(settings)
    async with ResultStore(settings, pool) as results:
        yield Toolbox(settings, results, Credentials(settings, pool), clients, sessions.get)
    await clients.close()


@pytest.fixture
def run(box: Toolbox, tmp_path: Path) -> Run:
    """Runs one call: ``await run(function="file.py:name", input={...})``; ``result`` is the task's spec."""
    tool, executions = SparkTool(), itertools.count(1)

    async def run_tool(
        *, input: dict[str, Any] | None = None, result: ResultSpec | None = None, **config: Any
    ) -> ToolResult:
        spec = TaskSpec(result=result or ResultSpec())
        task = Task(name="work", kind="spark", config=config, spec=spec)
        execution = next(executions)
        call = ToolCall(execution, "crunch", task, config, input or {}, folder=str(tmp_path))
        return await tool.run(call, box)

    return run_tool
