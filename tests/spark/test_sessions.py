"""The shared session: one a process, quiet, local, and replaced when its JVM dies."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from noetl_dagster.errors import ServiceError
from noetl_dagster.settings import Settings
from noetl_dagster.spark import sessions as spark_sessions
from noetl_dagster.spark.sessions import JAVA_OPTIONS, SparkSessions, check_address, session_config
from tests.waiting import PROCESS_SECONDS

pytestmark = pytest.mark.spark

IMAGE = {"spark.kubernetes.container.image": "registry/noetl:1"}


def test_one_session_is_shared(sessions: SparkSessions, spark: SparkSession) -> None:
    assert sessions.get() is spark
    assert spark.conf.get("spark.sql.ansi.enabled") == "true"
    assert spark.sparkContext.uiWebUrl is None
    assert spark.sparkContext.getConf().get("spark.driver.bindAddress") == "127.0.0.1"


WITHOUT_NAME = """
import sys
from pathlib import Path
from noetl_dagster.settings import Settings
from noetl_dagster.spark.sessions import SparkSessions

home = Path(sys.argv[1])
session = SparkSessions(Settings(home=home / "home")).get()
session.range(10).write.parquet(str(home / "out"))
print(session.sparkContext.sparkUser(), session.read.parquet(str(home / "out")).count())
"""


@pytest.mark.slow  # a JVM of its own
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, to be another user")
def test_a_user_that_the_system_does_not_know() -> None:
    """As OpenShift starts containers: a number without a name, and a home that is not its own."""
    reads = "+dac_read_search,+dac_override"  # only to reach this interpreter, which may be in root's home
    become = ["setpriv", "--reuid=1234567", "--regid=0", "--clear-groups", f"--inh-caps={reads}"]
    command = [*become, f"--ambient-caps={reads}", sys.executable, "-c", WITHOUT_NAME]
    variables = {name: os.environ[name] for name in ("PATH", "JAVA_HOME") if name in os.environ} | {"HOME": "/"}
    with tempfile.TemporaryDirectory() as folder:  # pytest's are root's alone
        os.chown(folder, 1234567, 0)
        done = subprocess.run(
            [*command, folder], env=variables, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False
        )
    assert done.stdout == "noetl 10\n", done.stderr[:3000]


def test_a_user_without_a_name_gets_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "user.home" not in session_config(Settings(home=tmp_path))[JAVA_OPTIONS]
    monkeypatch.setattr(os, "geteuid", lambda: 1234567)
    assert f"-Duser.name=noetl -Duser.home={tmp_path}" in session_config(Settings(home=tmp_path))[JAVA_OPTIONS]


def test_settings_have_the_last_word() -> None:
    settings = Settings(spark_config={"spark.sql.ansi.enabled": "false"}, spark_driver_memory="3g")
    config = session_config(settings)
    assert config["spark.sql.ansi.enabled"] == "false"
    assert config["spark.driver.memory"] == "3g"
    assert "spark.local.dir" not in session_config(Settings(spark_master="spark://cluster:7077"))
    assert "spark.driver.memory" not in session_config(Settings(spark_remote="sc://cluster:15002"))


def test_a_stopped_session_is_replaced_in_the_same_jvm(sessions: SparkSessions) -> None:
    first = sessions.get()
    jvm = SparkContext._gateway
    sessions.stop()
    second = sessions.get()
    assert second is not first
    assert second.range(3).count() == 3
    second.stop()  # by somebody else
    third = sessions.get()
    assert third is not second
    assert third.range(4).count() == 4
    third.sparkContext._jsc.sc().stop()  # by the JVM itself
    assert sessions.get().range(5).count() == 5
    assert SparkContext._gateway is jvm


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            Settings(spark_master="spark:/cluster"),
            ["spark:/cluster", "NOETL_SPARK_MASTER", "spark://host:7077"],
        ),
        (Settings(spark_master="k8s://https://kube:443"), ["spark.kubernetes.container.image"]),
        (
            Settings(spark_master="k8s://https://127.0.0.1:6443", spark_config=IMAGE),
            ["cannot connect back to this process at 127.0.0.1", "spark.driver.host", "NOETL_SPARK_CONFIG"],
        ),
    ],
)
def test_an_address_that_cannot_work_is_refused_at_once(settings: Settings, words: list[str]) -> None:
    with pytest.raises(ServiceError) as caught:
        SparkSessions(settings).get()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("master", ["local", "local[*]", "local[4]", "local[4,2]", "spark://a:7077,b:7077"])
def test_masters_that_spark_knows_are_taken(master: str) -> None:
    check_address(Settings(spark_master=master))


def test_a_kubernetes_master_gets_what_client_mode_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_sessions, "NAMESPACE", tmp_path / "namespace")
    settings = Settings(spark_master="k8s://https://192.0.2.1:443", spark_config=IMAGE)
    config = session_config(settings)
    assert "spark.kubernetes.namespace" not in config
    (tmp_path / "namespace").write_text("pipelines\n")
    config = session_config(settings)
    assert config["spark.kubernetes.namespace"] == "pipelines", "executors stand beside this pod"
    assert config["spark.submit.deployMode"] == "client"
    assert config["spark.driver.bindAddress"] == "0.0.0.0"
    assert re.fullmatch(r"[\d.]+", config["spark.driver.host"]), "executors find the driver by its address"
    assert config["spark.kubernetes.container.image"] == "registry/noetl:1"
    assert "spark.local.dir" not in config
    given = {"spark.driver.host": "driver", "spark.kubernetes.namespace": "spark"}
    own = settings.model_copy(update={"spark_config": IMAGE | given})
    check_address(own)
    assert given.items() <= session_config(own).items()


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
        capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False,
        env={**os.environ, "JAVA_HOME": "/nowhere"},
    )  # fmt: skip
    assert "Spark at local[*] does not start" in done.stdout, done.stderr
    assert "Java 17" in done.stdout


@pytest.mark.parametrize(("version", "shares"), [("17.0.19", False), ("19", True), ("25.0.1", True)])
def test_a_java_that_can_keeps_its_classes(
    version: str, shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "release").write_text(f'IMPLEMENTOR="any"\nJAVA_VERSION="{version}"\n')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    options = session_config(Settings(home=tmp_path / "a folder"))["spark.driver.extraJavaOptions"]
    assert (f"-XX:SharedArchiveFile='{tmp_path}/a folder/spark/classes.jsa'" in options) is shares
