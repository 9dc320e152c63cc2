"""Processes of their own that use Spark: over Connect against a real server, and submitted.

One server serves all: the resource, spark steps, fan-outs, the event log and its replay, and a job that a step runs.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
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

pytestmark = pytest.mark.spark

JOB = """
    import sys
    from dagster_pipes import open_dagster_pipes
    from pyspark.sql import SparkSession

    with open_dagster_pipes() as pipes:
        builder = SparkSession.builder
        spark = (builder.remote(sys.argv[1]) if len(sys.argv) > 1 else builder).getOrCreate()
        rows = spark.range(1000).where("id % 7 = 0").count()
        pipes.log.info(f"{rows} rows by {type(spark).__module__}")
        pipes.report_asset_materialization(metadata={"dagster/row_count": rows})
"""


@pytest.fixture(scope="module")
def server_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("connect")


@pytest.fixture(scope="module")
def remote(server_folder: Path) -> Iterator[str]:
    with connect_server(server_folder) as address:
        yield address


@pytest.mark.slow
def test_everything_works_over_connect(remote: str, settings: Settings, server_folder: Path) -> None:
    own = settings.model_copy(update={"spark_remote": remote, "default_postgres_credential": "embedded"})
    done = run_client("-m", "tests.spark.remote.connect_client", dump_settings(own))
    assert done.stdout.endswith("ok\n"), done.stderr[-6000:] + (server_folder / "server.log").read_text()[-3000:]


def ran(settings: Settings, instance: DagsterInstance, tmp_path: Path, command: str, *words: str) -> list[str]:
    """Runs the job by a command; gives what the run's log says, and checks what the asset shows."""
    job = tmp_path / "job.py"
    job.write_text(dedent(JOB))
    line = shlex.join([*shlex.split(command), str(job), *words])
    text = f"workflow:\n  - step: start\n    tool: {{kind: shell, pipes: true, cmds: {line!r}, env: {{PYSPARK_PYTHON: {sys.executable}}}}}\n"
    try:
        job_def = definitions_of([playbook(text)], EngineProvider(settings)).resolve_job_def("sample")
        done = job_def.execute_in_process(instance=instance, raise_on_error=False)
    finally:
        close_engines()
    logged = [one.user_message for one in instance.all_logs(done.run_id)]
    assert done.success, logged
    event = instance.get_latest_materialization_event(AssetKey(["tests", "sample", "start"]))
    assert event is not None
    assert event.asset_materialization is not None
    assert event.asset_materialization.metadata["dagster/row_count"].value == 143
    return logged


def test_a_submitted_job_is_heard(settings: Settings, dagster_instance: DagsterInstance, tmp_path: Path) -> None:
    submit = shlex.join(
        [
            *(str(HOME / "bin" / "spark-submit"), "--master", "local[1]", "--conf", "spark.ui.enabled=false"),
            *("--driver-memory", "512m", "--driver-java-options", SHORT_LIVED_JVM),
        ]
    )
    logged = ran(settings, dagster_instance, tmp_path, submit)
    assert "143 rows by pyspark.sql.session" in logged


def test_a_job_over_connect_is_heard(
    remote: str, settings: Settings, dagster_instance: DagsterInstance, tmp_path: Path
) -> None:
    logged = ran(settings, dagster_instance, tmp_path, sys.executable, remote)
    assert "143 rows by pyspark.sql.connect.session" in logged
