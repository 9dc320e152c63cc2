"""A standalone cluster, ``spark://``: a step whose executor is killed in its middle succeeds all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pyarrow.parquet as pq
import pytest

from noetl_dagster.settings import Settings, dump_settings
from tests.spark.remote.servers import answers, free_port, one_step, run_client, served

pytestmark = [pytest.mark.spark, pytest.mark.slow]

DEPLOY = "org.apache.spark.deploy"
CLIENT = """
import asyncio
import sys

from noetl_dagster.engine.engine import Engine
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import load_settings

async def main():
    engine = await Engine.open(load_settings(sys.argv[1]))
    try:
        state = await engine.run(parse_playbook(sys.argv[2], file="lost.yaml"), {"marker": sys.argv[3]})
    finally:
        await engine.close()
    print(state.status, state.error, state.execution_id)

asyncio.run(main())
"""
CODE = """
import pathlib
from pyspark.sql import functions as F

def main(spark, marker):
    def once(n):
        import os, signal, time
        if n == 999:
            # until another task has written its file
            while not list(pathlib.Path(marker).parent.rglob("part-*.parquet")):
                time.sleep(0.05)
            try:
                pathlib.Path(marker).touch(exist_ok=False)
            except FileExistsError:
                return n
            import psutil
            executor = psutil.Process(os.getppid()).parent()
            pathlib.Path(marker).write_text(" ".join(executor.cmdline()))
            executor.kill()
            time.sleep(60)
        return n

    return spark.range(0, 1000, 1, 4).select(F.udf(once, "long")("id").alias("n"))
"""


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """The address of a master with one worker, whose executors have a core each."""
    port = free_port()
    address = f"spark://127.0.0.1:{port}"
    own = ["--host", "127.0.0.1", "--webui-port", "0"]
    leader = ["spark-class", f"{DEPLOY}.master.Master", *own, "--port", str(port)]
    room = ["--cores", "2", "--memory", "2g", "--work-dir", str(tmp_path / "work")]
    worker = ["spark-class", f"{DEPLOY}.worker.Worker", *own, *room, address]
    with (
        served(leader, tmp_path, "master", lambda _: answers(port)),
        served(worker, tmp_path, "worker", lambda log: "Successfully registered with master" in log),
    ):
        yield address


async def test_a_killed_executor_costs_its_tasks_only(
    master: str, settings: Settings, pool: asyncpg.Pool, tmp_path: Path
) -> None:
    volume = settings.pvc_mount_path
    assert volume is not None
    marker = volume / "killed"
    config = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.cores": "1",
        "spark.executor.memory": "512m",
    }
    own = settings.model_copy(update={"spark_master": master, "spark_config": config})
    done = await asyncio.to_thread(run_client, "-c", CLIENT, dump_settings(own), one_step("lost", CODE), str(marker))
    assert done.stdout.startswith("COMPLETED"), done.stdout + done.stderr[-5000:]
    assert "CoarseGrainedExecutorBackend" in marker.read_text(), "an executor was killed"
    attempts = await pool.fetch("SELECT event_type FROM noetl.event WHERE event_type LIKE 'command.%ed'")
    assert sorted(row["event_type"] for row in attempts) == [
        "command.claimed", "command.completed", "command.issued",
    ]  # fmt: skip
    (ref,) = await pool.fetch("SELECT * FROM noetl.result_ref WHERE kind = 'dataset'")
    assert ref["rows"] == 1000
    folder = Path(ref["physical_uri"].removeprefix("file://"))
    assert sorted(pq.read_table(folder)["n"].to_pylist()) == list(range(1000))
    lost = [path for path in volume.rglob("*.parquet") if not path.is_relative_to(folder)]
    assert lost + list(volume.rglob("_temporary")) == [], "nothing of the lost tasks is left"
