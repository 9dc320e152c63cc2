"""Processes of their own that use Spark: over Connect against a real server, and submitted.

One server serves all: the resource, spark steps, fan-outs, and the event log.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from dagster import AssetKey, DagsterInstance

from noetl_dagster.resources.engines import EngineProvider, close_engines
from noetl_dagster.settings import Settings, dump_settings
from tests.conftest import SHORT_LIVED_JVM
from tests.definitions import definitions_of
from tests.playbooks import playbook
from tests.spark.remote.servers import HOME, connect_server, run_client

pytestmark = [pytest.mark.spark, pytest.mark.slow]  # JVMs of their own

JOB = """
    from dagster_pipes import open_dagster_pipes
    from pyspark.sql import SparkSession

    with open_dagster_pipes() as pipes:
        rows = SparkSession.builder.getOrCreate().range(1000).where("id % 7 = 0").count()
        pipes.log.info(f"{rows} rows")
        pipes.report_asset_materialization(metadata={"dagster/row_count": rows})
"""


def test_everything_works_over_connect(settings: Settings, tmp_path: Path) -> None:
    with connect_server(tmp_path) as remote:
        own = settings.model_copy(update={"spark_remote": remote, "default_postgres_credential": "embedded"})
        client = run_client("-m", "tests.spark.remote.connect_client", dump_settings(own))
    assert client.stdout.endswith("ok\n"), client.stderr[-6000:] + (tmp_path / "server.log").read_text()[-3000:]


def test_a_submitted_job_is_heard(settings: Settings, dagster_instance: DagsterInstance, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(dedent(JOB))
    line = shlex.join(
        [
            *(str(HOME / "bin" / "spark-submit"), "--master", "local[1]", "--conf", "spark.ui.enabled=false"),
            *("--driver-memory", "512m", "--driver-java-options", SHORT_LIVED_JVM, str(job)),
        ]
    )
    text = f"workflow:\n  - step: start\n    tool: {{kind: shell, pipes: true, cmds: {line!r}, env: {{PYSPARK_PYTHON: {sys.executable}}}}}\n"
    try:
        job_def = definitions_of([playbook(text)], EngineProvider(settings)).resolve_job_def("sample")
        run = job_def.execute_in_process(instance=dagster_instance, raise_on_error=False)
    finally:
        close_engines()
    logged = [entry.user_message for entry in dagster_instance.all_logs(run.run_id)]
    assert run.success, logged
    event = dagster_instance.get_latest_materialization_event(AssetKey(["tests", "sample", "start"]))
    assert event is not None
    assert event.asset_materialization is not None
    assert event.asset_materialization.metadata["dagster/row_count"].value == 143
    assert "143 rows" in logged
