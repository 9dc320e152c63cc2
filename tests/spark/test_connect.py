"""Spark Connect against a real server: the resource, and the tool, whose data lies on the shared volume."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

pytestmark = pytest.mark.spark

SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
CLIENT = """
import sys
from pathlib import Path

from dagster import asset, materialize

from noetl_dagster.playbook.models import Task
from noetl_dagster.resources.spark import PySparkResource
from noetl_dagster.settings import Settings
from noetl_dagster.spark.datasets import Layout, write_dataset
from noetl_dagster.spark.results_source import StoredPart, dump_parts
from noetl_dagster.spark.sessions import SparkSessions, is_classic, own_session

remote, home = sys.argv[1], Path(sys.argv[2])
volume = home / "volume"
volume.mkdir()

@asset
def totals(pyspark: PySparkResource) -> int:
    assert not is_classic(pyspark.spark_session)
    return pyspark.spark_session.range(4).count()

done = materialize([totals], resources={"pyspark": PySparkResource(remote=remote)})
assert done.output_for_node("totals") == 4

settings = Settings(home=home, spark_remote=remote, pvc_mount_path=volume)
sessions = SparkSessions(settings)
spark = own_session(sessions.get(), settings, "group", "test")
rows = volume / "rows.json"
rows.write_text('[{"n": 1}, {"n": 2}]')
parts = dump_parts([StoredPart(rows.as_uri(), "application/json")])
values = spark.read.format("noetl_results").option("parts", parts).load()
assert sorted(row.value for row in values.collect()) == ['{"n":1}', '{"n":2}']
written = write_dataset(values, settings, (volume / "set").as_uri() + "/", Layout())
assert written.rows == 2 and len(written.files) >= 1
sessions.stop()
print("ok")
"""


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    """The address of a Connect server of one core."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    home = Path(pyspark.__file__).parent
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "768m",
        "spark.ui.enabled": "false",
        "spark.local.dir": str(tmp_path / "local"),
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
    }
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    command = [str(home / "bin" / "spark-submit"), "--class", SERVER, "--master", "local[1]", *options]
    environment = {**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable}
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=tmp_path, env=environment, start_new_session=True
        )
    try:
        _wait(server, port, tmp_path / "server.log")
        yield f"sc://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.3)
    raise AssertionError(log.read_text()[-3000:])


def test_resource_and_sources_work_over_connect(remote: str, tmp_path: Path) -> None:
    """In a process of its own: PySpark has either a JVM or a Connect session."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CLIENT), remote, str(tmp_path)],
        capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "SPARK_HOME"},
    )  # fmt: skip
    assert done.stdout.endswith("ok\n"), done.stderr[-4000:] + (tmp_path / "server.log").read_text()[-3000:]
