"""How far a spark step is, while it runs: in the Dagster run's log and tags, and on the command line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from dagster import DagsterInstance

from noetl_dagster.cli.progress import _ProgressLines
from noetl_dagster.compiler import session
from noetl_dagster.compiler.runs import EXECUTION_TAG
from noetl_dagster.engine.executions.progress import running_notes
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider, close_engines
from noetl_dagster.settings import Settings
from noetl_dagster.spark.metrics import _named
from noetl_dagster.spark.sessions import SparkSessions
from tests.definitions import definitions_of
from tests.spark.remote.servers import one_step
from tests.waiting import until

pytestmark = pytest.mark.spark

CODE = """
import pathlib, time
from pyspark.sql import functions as F

def main(spark, marker):
    def wait(n):
        while n and not pathlib.Path(marker).exists():
            time.sleep(0.1)
        return n
    return spark.range(0, 2, 1, 2).select(F.udf(wait, "long")("id").alias("n"))
"""


async def test_stages_and_tasks_reach_the_runs_log_and_the_command_line(
    settings: Settings,
    sessions: SparkSessions,
    dagster_instance: DagsterInstance,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sessions.get()
    monkeypatch.setattr(session, "REPORT_SECONDS", 0.2)
    noetl = EngineProvider(settings.model_copy(update={"command_heartbeat_seconds": 0.6}))
    job = definitions_of([parse_playbook(one_step("told", CODE), file="told.yaml")], noetl)
    config = {"ops": {"told_playbook": {"config": {"marker": str(tmp_path / "go")}}}}

    def tags() -> dict[str, str]:
        return dict(dagster_instance.get_runs()[0].tags) if dagster_instance.get_runs() else {}

    try:
        running = asyncio.create_task(
            asyncio.to_thread(
                job.resolve_job_def("told").execute_in_process, run_config=config, instance=dagster_instance
            )
        )
        await until(lambda: running.done() or "1/2 tasks" in tags().get(session.PROGRESS_TAG, ""), "a note")
        assert tags()[session.PROGRESS_TAG].startswith("start: spark stage ")
        engine, execution_id = noetl.engine(), int(tags()[EXECUTION_TAG])
        capsys.readouterr()
        await asyncio.to_thread(_ProgressLines().refresh, engine, execution_id)
        assert "start: running spark stage" in capsys.readouterr().err
        (tmp_path / "go").touch()
        assert (await running).success
        assert await asyncio.to_thread(run_sync, running_notes(engine.runtime.pool, execution_id)) == {}
    finally:
        (tmp_path / "go").touch()
        await asyncio.to_thread(close_engines)


@pytest.mark.parametrize(
    ("stage_name", "named"),
    [
        ("save at NativeMethodAccessorImpl.java:0", " 'save'"),
        ("$anonfun$withThreadLocalCaptured$1 at CompletableFuture.java:1768", ""),
        ("", ""),
    ],
)
def test_a_stage_is_named_after_its_operation_where_it_has_a_name(stage_name: str, named: str) -> None:
    assert _named(stage_name) == named
