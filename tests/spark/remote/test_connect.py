"""Spark Connect against a real server: the resource, spark steps, fan-outs, the event log and its replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from noetl_dagster.settings import Settings, dump_settings
from tests.spark.remote.servers import answers, free_port, run_client, served

pytestmark = pytest.mark.spark

SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    """The address of a Connect server of one core."""
    port = free_port()
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "768m",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.python.daemon.module": "noetl_dagster.spark.daemon",
        "spark.ui.enabled": "false",
        "spark.local.dir": str(tmp_path / "local"),
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
    }
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    command = ["spark-submit", "--class", SERVER, "--master", "local[1]", *options]
    with served(command, tmp_path, "server", lambda _: answers(port)):
        yield f"sc://127.0.0.1:{port}"


def test_everything_works_over_connect(remote: str, settings: Settings, tmp_path: Path) -> None:
    own = settings.model_copy(update={"spark_remote": remote, "default_postgres_credential": "embedded"})
    done = run_client("-m", "tests.spark.remote.connect_client", dump_settings(own))
    assert done.stdout.endswith("ok\n"), done.stderr[-6000:] + (tmp_path / "server.log").read_text()[-3000:]
