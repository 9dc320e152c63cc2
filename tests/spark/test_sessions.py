"""The shared session: one a process, quiet, local, and replaced when its JVM dies."""

import os
import subprocess
import sys
import textwrap

import pytest
from pyspark.sql import SparkSession

from noetl_dagster.settings import Settings
from noetl_dagster.spark.sessions import SparkSessions, session_config

pytestmark = pytest.mark.spark


def test_one_session_is_shared(sessions: SparkSessions, spark: SparkSession) -> None:
    assert sessions.get() is spark
    assert spark.conf.get("spark.sql.ansi.enabled") == "true"
    assert spark.sparkContext.uiWebUrl is None
    assert spark.sparkContext.getConf().get("spark.driver.bindAddress") == "127.0.0.1"


def test_settings_have_the_last_word() -> None:
    settings = Settings(spark_config={"spark.sql.ansi.enabled": "false"}, spark_driver_memory="3g")
    config = session_config(settings)
    assert config["spark.sql.ansi.enabled"] == "false"
    assert config["spark.driver.memory"] == "3g"
    assert "spark.local.dir" not in session_config(Settings(spark_master="spark://cluster:7077"))
    assert "spark.driver.memory" not in session_config(Settings(spark_remote="sc://cluster:15002"))


def test_a_spark_that_does_not_start_says_where_and_why(tmp_path: object) -> None:
    script = textwrap.dedent(
        """
        import sys, pathlib
        from noetl_dagster.errors import ServiceError
        from noetl_dagster.settings import Settings
        from noetl_dagster.spark.sessions import SparkSessions
        try:
            SparkSessions(Settings(home=pathlib.Path(sys.argv[1]))).get()
        except ServiceError as error:
            print(error)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "JAVA_HOME": "/nowhere"},
    )  # fmt: skip
    assert "Spark at local[*] does not start" in done.stdout, done.stderr
    assert "Java 17" in done.stdout
