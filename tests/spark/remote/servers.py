"""Spark's own servers, from the jars that PySpark brings."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from tests.conftest import SHORT_LIVED_JVM
from tests.waiting import PROCESS_SECONDS

HOME = Path(pyspark.__file__).parent
PROJECT = Path(__file__).parents[3]
PATIENCE_SECONDS = 180.0
CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def run_client(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own: PySpark has one JVM or one connection a process, for good."""
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False, cwd=PROJECT,
        env={name: value for name, value in os.environ.items() if name != "SPARK_HOME"},
    )  # fmt: skip


def one_step(name: str, code: str) -> str:
    """A playbook of one spark step, whose code gets the workload's ``marker``."""
    return textwrap.dedent(
        f"""
            apiVersion: noetl.io/v2
            kind: Playbook
            metadata: {{name: {name}, path: tests/{name}}}
            workload: {{marker: ""}}
            workflow:
              - step: start
                tool:
                  kind: spark
                  input: {{marker: "{{{{ marker }}}}"}}
                  code: |
            """
    ) + textwrap.indent(textwrap.dedent(code), " " * 8)


@contextmanager
def served(command: list[str], folder: Path, name: str, ready: Callable[[str], bool]) -> Iterator[Path]:
    """Runs one of ``bin/``'s programs until the block ends, with all that it starts; gives its log file.

    Args:
        ready: whether it serves, from what it has logged so far.
    """
    log = folder / f"{name}.log"
    environment = {**os.environ, "SPARK_HOME": str(HOME), "PYSPARK_PYTHON": sys.executable}
    with log.open("w") as output:
        server = subprocess.Popen(
            [str(HOME / "bin" / command[0]), *command[1:]],
            stdout=output, stderr=output, cwd=folder, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not ready(log.read_text()):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield log
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """The address of a Connect server of one core, whose log is ``server.log``."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "768m",
        "spark.driver.extraJavaOptions": SHORT_LIVED_JVM,
        "spark.python.daemon.module": "noetl_dagster.spark.daemon",
        "spark.ui.enabled": "false",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    command = ["spark-submit", "--class", CONNECT, "--master", "local[1]", *options]
    with served(command, folder, "server", lambda _: answers(port)):
        yield f"sc://127.0.0.1:{port}"
