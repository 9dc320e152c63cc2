"""The Spark session of a process: started on first use, shared by every step, replaced after it has ended."""

from __future__ import annotations

import logging
import os
import pwd
import re
import shlex
import shutil
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from noetl_dagster import machine
from noetl_dagster.errors import ServiceError
from noetl_dagster.settings import Settings
from noetl_dagster.spark.ahead import expects_short_steps, step_begins

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MASTER = r"local(\[[^\]]+\]|-cluster\[\d+,\d+,\d+\])?|spark://\S+:\d+(,\S+:\d+)*|k8s://\S+|yarn"

JAVA_OPTIONS = "spark.driver.extraJavaOptions"
VECTORED = "spark.hadoop.parquet.hadoop.vectored.io.enabled"
"""With this setting Parquet's reader bypasses Hadoop's statistics, and Spark counts only some hundred bytes."""

LOGGING = Path(__file__).with_name("log4j2.properties")
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""The file with a pod's namespace; without it Spark would start executors in ``default``."""

FIRST_ONLY = "-XX:TieredStopAtLevel=1"
"""JVM option for short jobs: only the first compiler, whose code is slower but soon there.

A job of 0.6 million records takes a third less CPU time with it, and one of five millions half as much again."""

HOT_ONLY = (
    "-XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 "
    "-XX:Tier4CompileThreshold=150000 -XX:Tier4BackEdgeThreshold=400000"
)
"""JVM options: the second compiler, slow but thorough, compiles only code that runs ten times more than by default.

So a short job is compiled quickly, and a long one well. ``benchmarks/README.md`` has the costs of each."""

SHARES_CLASSES = 19  # the Java since which a JVM makes, checks and renews its own archive (JDK-8261455)
SHARE_CLASSES = "-XX:+AutoCreateSharedArchive -Xlog:cds=off -Xlog:cds+dynamic=off"
"""JVM options: the first JVM that ends keeps its loaded classes in a file, with which later ones start."""

NAMELESS = "noetl"
"""The user's name for Spark and Hadoop if the system knows none for its number, as on OpenShift."""

_connected: dict[str, SparkSession] = {}
"""Connect sessions of running calls, by group: only an operation's own session can interrupt it."""


def session_config(settings: Settings, *, short: bool = False) -> dict[str, str]:
    """Returns the configuration of a session, by ``spark.*`` names; ``NOETL_SPARK_CONFIG`` overrides it."""
    config = {
        "spark.app.name": "noetl-dagster",
        # wrong casts and overflows are errors, not silent nulls
        "spark.sql.ansi.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # an exception of a user's function shows the user's lines only
        "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "true",
    }
    if settings.spark_remote is not None:
        return config | settings.spark_config
    folder = settings.home.absolute() / "spark"
    java_options = [f"-Dlog4j2.configurationFile={shlex.quote(LOGGING.as_uri())}"]
    java_options.append(FIRST_ONLY if short else HOT_ONLY)
    if java_version() >= SHARES_CLASSES:
        java_options.append(f"{SHARE_CLASSES} -XX:SharedArchiveFile={shlex.quote(str(folder / 'classes.jsa'))}")
    if not has_passwd_entry():
        java_options.append(f"-Duser.name={NAMELESS} -Duser.home={shlex.quote(str(settings.home.absolute()))}")
    config |= {
        "spark.driver.memory": settings.spark_driver_memory or machine.driver_memory(),
        JAVA_OPTIONS: " ".join(filter(None, (*java_options, settings.spark_driver_java_options))),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    }
    if settings.spark_master.startswith("local"):
        config |= {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.python.daemon.module": "noetl_dagster.spark.daemon",
            # otherwise Spark would not count what it reads
            VECTORED: "false",
            "spark.local.dir": str(folder / "local"),
            # adaptive execution merges what is too small; 200, the default, is for clusters
            "spark.sql.shuffle.partitions": str(max(8, 2 * machine.cores())),
        }
    elif settings.spark_master.startswith("k8s://"):  # this process starts pods, which connect back to it
        config |= {"spark.submit.deployMode": "client", "spark.driver.bindAddress": "0.0.0.0"}
        if (address := _address_towards(settings.spark_master)) is not None:
            config["spark.driver.host"] = address
        if NAMESPACE.is_file():
            config["spark.kubernetes.namespace"] = NAMESPACE.read_text().strip()
    return config | settings.spark_config


def java_version() -> int:
    """Returns the major version of the Java that ``spark-class`` starts; 0 if its ``release`` file names none."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    with suppress(OSError):
        release = Path(java).resolve().parents[1].joinpath("release").read_text() if java else ""
        if version := re.search(r'^JAVA_VERSION="(\d+)', release, re.MULTILINE):
            return int(version[1])
    return 0


def has_passwd_entry() -> bool:
    """Reports whether the system knows a name and a home for the user of this process."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return True


def _address_towards(master: str) -> str | None:
    """Returns this machine's address towards a Kubernetes master: other pods cannot resolve a pod's host name."""
    url = master.removeprefix("k8s://")
    with suppress(OSError, ValueError):
        parts = urlsplit(url if "://" in url else f"https://{url}")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((parts.hostname, parts.port or 443))
            return str(probe.getsockname()[0])
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return None


def check_address(settings: Settings) -> None:
    """Checks the master, since Spark itself would report an error in a Java stack, or only after minutes.

    Raises:
        ServiceError: Spark has no such kind of master, or a Kubernetes master has no image to start
            or no way back to this process.
    """
    if settings.spark_remote is not None:  # the settings check this address
        return
    address = settings.spark_master
    if not re.fullmatch(_MASTER, address):
        raise ServiceError(
            f"Spark at {address}: not an address; NOETL_SPARK_MASTER is local[*], local[4], spark://host:7077 or "
            "k8s://https://host:443"
        )
    if not address.startswith("k8s://"):
        return
    images = ("spark.kubernetes.container.image", "spark.kubernetes.executor.container.image")
    if not any(name in settings.spark_config for name in images):
        raise ServiceError(
            f"Spark at {address}: executors need an image with Spark and this package; set NOETL_SPARK_CONFIG "
            f"""to '{{"{images[0]}": "registry/image:tag"}}'"""
        )
    host = session_config(settings).get("spark.driver.host", "")
    if not host or host.startswith("127."):
        raise ServiceError(
            f"Spark at {address}: executors cannot connect back to this process at {host or 'an unknown address'}; "
            "set spark.driver.host in NOETL_SPARK_CONFIG to an address that pods reach"
        )


class SparkSessions:
    """Owns the Spark session of this process. Thread-safe; starting takes some five seconds."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._session: SparkSession | None = None
        self._pid = os.getpid()

    def get(self) -> SparkSession:
        """Returns the session; starts one if there is none or its JVM or connection has ended.

        Raises:
            ServiceError: Spark does not start; names the address and a remedy.
        """
        with self._lock:
            if self._pid != os.getpid():  # a forked child must not use its parent's sockets
                self._abandon()
            if self._session is not None and not is_alive(self._session):
                self._abandon()
            if self._session is None:
                self._session = self._start()
            return self._session

    def stop(self) -> None:
        """Ends the session; the next :meth:`get` starts another."""
        with self._lock:
            session, self._session = self._session, None
            if session is not None and self._pid == os.getpid():
                with suppress(Exception):  # it may have ended already
                    session.stop()

    def _start(self) -> SparkSession:
        settings = self._settings
        check_address(settings)
        # planners and workers must find this package: PySpark would start whatever python3 is on the PATH
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        if not has_passwd_entry():
            os.environ.setdefault("SPARK_USER", NAMELESS)
        try:
            session = _build(settings)
        except Exception as error:
            raise ServiceError(
                f"Spark at {settings.spark_address} does not start: {str(error).partition(chr(10))[0]}; "
                "a local one needs Java 17 or newer on the PATH or in JAVA_HOME"
            ) from error
        register_source(session, settings)
        # PySpark also prints what it raises
        logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
        return session

    def _abandon(self) -> None:
        """Drops a session that has ended, with its JVM unless that can start another."""
        session, self._session = self._session, None
        forked = self._pid != os.getpid()
        self._pid = os.getpid()
        if self._settings.spark_remote is not None:
            return
        from pyspark import SparkContext

        if forked or not jvm_answers():
            forget_jvm()
        elif session is not None and session.sparkContext is SparkContext._active_spark_context:
            with suppress(Exception):  # PySpark has to know that the JVM has ended it
                session.stop()


def _build(settings: Settings) -> SparkSession:
    # this module is imported by processes that must start without importing Spark
    from pyspark.sql import SparkSession

    from noetl_dagster.spark.staging import sweep

    sweep(settings)
    builder = SparkSession.builder
    for name, value in session_config(settings, short=expects_short_steps()).items():
        builder = builder.config(name, value)
    if settings.spark_remote is not None:
        return builder.remote(settings.spark_remote).getOrCreate()
    session = builder.master(settings.spark_master).getOrCreate()
    if not has_passwd_entry():
        _log_in(session)
    return session


def _log_in(session: SparkSession) -> None:
    """Tells Hadoop the user, whom it would ask the system for: reading and writing files would fail."""
    users = session._jvm.org.apache.hadoop.security.UserGroupInformation  # type: ignore[union-attr]
    users.setLoginUser(users.createRemoteUser(os.environ["SPARK_USER"]))


def own_session(shared: SparkSession, settings: Settings, group: str, description: str) -> SparkSession:
    """Returns a separate session for one call in this thread, with its own views and settings.

    Its jobs carry ``group``. End it with :func:`release`.
    """
    session: SparkSession
    if is_classic(shared):
        step_begins()
        shared.sparkContext.setJobGroup(group, description, True)
        session = shared.newSession()
        activate(session)
    else:
        session = _connected[group] = shared.cloneSession()  # type: ignore[attr-defined]
    register_source(session, settings)
    return session


def release(group: str) -> None:
    """Ends a call's own session if a Connect server would keep it."""
    session = _connected.pop(group, None)
    if session is not None:
        with suppress(Exception):  # the server may have ended
            session.stop()


def register_source(session: SparkSession, settings: Settings) -> None:
    """Registers ``noetl_results`` with a session.

    A class of its own contains the settings for the executors, so addresses and keys are in no option and in no plan.
    """
    from noetl_dagster.spark.results import NoetlResults

    session.dataSource.register(type(NoetlResults.__name__, (NoetlResults,), {"settings": settings}))


def activate(session: SparkSession) -> None:
    """Makes a session the active one of this thread.

    Spark looks data sources up there, and a thread may still have an earlier call's, or none.
    """
    if is_classic(session):
        session._get_j_spark_session_class(session._jvm).setActiveSession(session._jsparkSession)


def cancel(shared: SparkSession, group: str) -> None:
    """Cancels the jobs of a group, if Spark still answers."""
    with suppress(Exception):
        if is_classic(shared):
            shared.sparkContext.cancelJobGroup(group)
        else:
            _connected[group].interruptAll()


def is_classic(session: SparkSession) -> bool:
    """Reports whether the session drives a JVM of this process, rather than a Connect server."""
    return hasattr(session, "_jsparkSession")


def is_alive(session: SparkSession) -> bool:
    """Reports whether a session still answers."""
    try:
        if is_classic(session):
            return not session.sparkContext._jsc.sc().isStopped()
        return bool(session.version)
    except Exception:
        return False


def jvm_answers() -> bool:
    """Reports whether PySpark's JVM runs, with or without a session."""
    from pyspark import SparkContext

    try:
        return bool(SparkContext._gateway.jvm.java.lang.System.nanoTime())  # type: ignore[union-attr]
    except Exception:
        return False


def forget_jvm() -> None:
    """Makes PySpark start a new JVM next time; it has no public way to drop one that has ended."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    SparkContext._gateway = None
    SparkContext._jvm = None
    SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
    SparkSession._activeSession = None
