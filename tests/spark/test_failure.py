"""A JVM that is killed in the middle of a step: the step's retry succeeds, and half a dataset is never seen."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.sql import SparkSession

from noetl_dagster.engine.engine import Engine
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.settings import Settings
from noetl_dagster.spark.failures import failure_of
from noetl_dagster.spark.results import FORMAT
from noetl_dagster.spark.sessions import SparkSessions, own_session
from tests.playbooks import text_of

pytestmark = pytest.mark.spark

PLAYBOOK = text_of(
    "killed",
    """
    workload: {marker: ""}
    workflow:
      - step: start
        tool:
          - name: crunch
            kind: spark
            input: {marker: "{{ marker }}"}
            code: |
              import os, pathlib, signal, threading, time
              from pyspark.sql import functions as F

              def main(spark, marker):
                  first = not pathlib.Path(marker).exists()
                  if first:
                      pathlib.Path(marker).touch()
                      jvm = spark.sparkContext._gateway.proc.pid
                      threading.Thread(target=kill_when_half_is_written, args=(jvm, marker)).start()

                  def wait(n):
                      if first and n >= 900:
                          time.sleep(120)
                      return n

                  return spark.range(0, 1000, 1, 4).select(F.udf(wait, "long")("id").alias("n"))

              def kill_when_half_is_written(jvm, marker):
                  volume = pathlib.Path(marker).parent
                  while not list(volume.rglob("part-*.parquet")):
                      time.sleep(0.1)
                  os.kill(jvm, signal.SIGKILL)
            spec:
              policy:
                rules:
                  - when: "{{ output.status == 'error' and error.retryable }}"
                    then: {do: retry, attempts: 3, backoff: none, delay: 0.1}
                  - when: "{{ output.status == 'error' }}"
                    then: {do: fail}
    """,
)


@pytest.mark.slow  # a JVM of its own
@pytest.mark.kills_the_jvm
async def test_a_killed_jvm_fails_the_attempt_and_the_retry_succeeds(
    settings: Settings, pool: asyncpg.Pool, sessions: SparkSessions
) -> None:
    volume = settings.pvc_mount_path
    assert volume is not None
    before = sessions.get()
    engine = await Engine.open(settings, spark=sessions.get)
    try:
        playbook = parse_playbook(PLAYBOOK, file="killed.yaml")
        state = await engine.run(playbook, {"marker": str(volume / "marker")})
        assert state.status == "COMPLETED", state
        refs = await pool.fetch("SELECT * FROM noetl.result_ref WHERE execution_id = $1", state.execution_id)
        (ref,) = [await engine.runtime.results.find(row["ref"]) for row in refs if row["kind"] == "dataset"]
        assert ref.rows == 1000
        assert (await engine.runtime.results.get(ref)).num_rows == 1000
    finally:
        await engine.close()
    assert sessions.get() is not before
    # all that lies on the volume belongs to the published dataset
    folder = Path(ref.physical_uri.removeprefix("file://"))
    assert [path for path in volume.rglob("*.parquet") if not path.is_relative_to(folder)] == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Py4JNetworkError("Answer from Java side is empty"), "connection"),
        (ConnectionRefusedError(111, "Connection refused"), "connection"),
        (RuntimeError("Cannot call methods on a stopped SparkContext"), "connection"),
        (RuntimeError("[DIVIDE_BY_ZERO] Division by zero"), "transform"),
    ],
)
def test_a_lost_jvm_is_worth_another_attempt(error: Exception, kind: str) -> None:
    failure = failure_of(error)
    assert (failure.kind, failure.retryable) == (kind, kind == "connection")


def test_keys_stay_out_of_the_plan(spark: SparkSession, tmp_path: Path) -> None:
    session = own_session(spark, Settings(home=tmp_path, minio_secret_key="hush"), "plan", "plan")  # type: ignore[arg-type]
    empty = session.read.format(FORMAT).option("parts", "[]").load()
    assert empty.count() == 0
    assert "hush" not in empty._jdf.queryExecution().toString()
