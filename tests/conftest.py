"""Fixtures over the real embedded services: one set of servers, and for each test everything of its own.

The servers live in ``.noetl-test/`` (or ``NOETL_TEST_HOME``) and are shared by xdist workers and by sessions
that run at the same time; the last session to end stops them.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import hashlib
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import asyncpg
import dagster
import psycopg2
import psycopg2.extensions
import pytest
import sqlalchemy.event
from dagster import DagsterInstance
from dagster._core.storage.event_log import ConsolidatedSqliteEventLogStorage
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from noetl_dagster import embedded
from noetl_dagster.embedded.isolation import database_url, isolated
from noetl_dagster.embedded.postgres import ROLE, administering
from noetl_dagster.events import schema
from noetl_dagster.events.connection import open_pool
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings, get_settings
from noetl_dagster.spark.sessions import SparkSessions
from tests import PARTITIONS_AHEAD
from tests.databases import Databases, superuser_url
from tests.forked import end_forks, fork_servers
from tests.processes import end_run_servers

PROJECT = Path(__file__).parents[1]
HOME = Path(os.environ.get("NOETL_TEST_HOME", PROJECT / ".noetl-test")).resolve()
IN_USE = pytest.StashKey[IO[str]]()
FOLDERS_FIRST = (
    *("pages", "spark", "browser", "helm", "chaos", "launcher", "kubernetes", "compiler", "cli", "io_managers"),
    *("pool_worker", "service", "code_location", "sensors", "embedded", "engine", "operations", "tools", "events"),
)
"""Their tests start JVMs, servers and processes, or take seconds."""

FILES_FIRST = (
    *("engine/steps/test_sinks", "engine/recovery/test_transfers", "engine/fanout/test_spark"),
    *("engine/recovery/test_transfers_to_folders", "engine/test_helpers", "tools/test_http_chunks"),
    *("tools/test_python_chunks", "tools/sql/test_large_rows", "code_location/test_component"),
)
"""Files of half a minute and more: one that another worker begins last would keep the others waiting."""

TOGETHER = {
    "one JVM": (
        *("tests/spark/", "tests/engine/fanout/test_spark.py", "tests/engine/fanout/test_engines.py"),
        *(
            "tests/io_managers/test_spark.py",
            "tests/io_managers/test_project.py",
            "tests/examples/test_spark_lake.py",
        ),
    ),
    "one browser": ("tests/browser/",),
    "one rendering": ("tests/helm/",),
    "one home": tuple(f"tests/embedded/test_{name}.py" for name in ("lifecycle", "environment", "object_store")),
}
"""Files that one process of xdist runs, since they share the JVM, Chromium, what Helm has rendered, or embedded servers.

A session takes ten seconds of CPU to start, and its first queries twice as much.
"""

OWN_JVM = ("tests/spark/remote/", "tests/spark/startup/")
"""Files of tests that start their JVMs themselves."""

SHORT_LIVED_JVM = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
"""Compiles quickly rather than well, and takes Spark's classes unchecked: half of what a short-lived JVM costs."""

# the same examples everywhere, however slow the machine is: a test that fails here fails there
hypothesis_settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("steady")


@sqlalchemy.event.listens_for(sqlalchemy.Engine, "connect")
def _without_waiting_for_the_disk(connection: object, _record: object) -> None:
    """Lets Dagster's files of SQLite be lost with the power, as the databases of PostgreSQL are."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")


def pytest_configure(config: pytest.Config) -> None:
    """Marks the servers as in use, and keeps the developer's own settings out of the tests."""
    for name in list(os.environ):
        ours = name.startswith("NOETL_") and not name.startswith("NOETL_TEST_")
        if ours or name == "DAGSTER_HOME":
            del os.environ[name]
    # Dagster gives SIGTERM the handler of SIGINT. A shell that starts a command in the background makes it ignore SIGINT;
    # the processes that capture output would then ignore their end for a minute
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["NOETL_CONTAINER_ALLOW"] = "hostPath, serviceAccount, secret"
    os.environ["NOETL_FILE_FOLDERS"] = tempfile.gettempdir()
    # Helm is written in Go, and otherwise spends 40 % of its time on garbage
    os.environ.setdefault("GOGC", "400")
    get_settings.cache_clear()
    HOME.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = (HOME / "in-use.lock").open("w")
    fcntl.flock(handle, fcntl.LOCK_SH)
    config.stash[IN_USE] = handle


def pytest_collectstart() -> None:
    """Pauses garbage collection, in processes that collect tests."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Excludes modules and tests from garbage collection: they stay, and scanning them took a third of collecting tests."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends forked processes that tests have left, and stops the servers, unless another session or worker uses them."""
    end_forks()
    if "noetl_dagster.testing.runs" in sys.modules:
        sys.modules["noetl_dagster.testing.runs"].close()
    handle = config.stash.get(IN_USE, None)
    if handle is None:
        return
    with handle, suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_UN)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _drop_leftovers()
        embedded.down(Settings(home=HOME))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts what takes long first, so that the last files of a run are short ones."""
    items.sort(key=lambda item: (item.get_closest_marker("kills_the_jvm") is not None, _rank(item)))


def _rank(item: pytest.Item) -> int:
    """The place of an item's file in a run: the long files, the folders that take long, and all others."""
    path = item.path.relative_to(PROJECT / "tests").with_suffix("").as_posix()
    folder = path.partition("/")[0]
    if path in FILES_FIRST or folder == "spark":
        return 0
    return FOLDERS_FIRST.index(folder) if folder in FOLDERS_FIRST else len(FOLDERS_FIRST)


class ByFileAndShared(LoadFileScheduling):
    """Gives the tests of a file to one worker, and those of files that share what is expensive too."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        if file.startswith(OWN_JVM):
            return file
        return next((name for name, files in TOGETHER.items() if file.startswith(files)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Distributes by files where nothing else is asked for."""
    return ByFileAndShared(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(autouse=True)
def _own_secrets() -> Iterator[None]:
    """Forgets the secrets of a test, so that texts of later ones are not masked."""
    yield
    SECRETS.forget()


@pytest.fixture(autouse=True)
def _forked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has run servers and code servers that the tests start forked from a process that has imported what they need."""
    fork_servers(monkeypatch.setattr)


@pytest.fixture(scope="session")
def services() -> Settings:
    """Settings with the addresses of the running embedded services.

    The key of the object store is in the environment, as after ``services env``: compute logs and IO managers that name
    only an endpoint take it from there.
    """
    found = embedded.ensure(Settings(home=HOME, spark_driver_java_options=SHORT_LIVED_JVM))
    os.environ["NOETL_MINIO_SECRET_KEY"] = found.minio_secret_key.get_secret_value()
    get_settings.cache_clear()
    return found


@pytest.fixture(scope="session")
def mysql() -> Iterator[Any]:
    """A MySQL server, see :mod:`tests.mysql`."""
    from tests.mysql import mysql_server  # imports sqlglot

    with mysql_server() as server:
        yield server


@pytest.fixture(scope="session")
def administrator(services: Settings) -> Iterator[psycopg2.extensions.cursor]:
    """A superuser's cursor on the server's own database.

    The server does not wait for the disk: tests kill processes, which loses nothing that a process had written,
    and never the power.
    """
    with administering(superuser_url(services)) as cursor:
        cursor.execute("SELECT pg_advisory_lock(hashtext('fsync'))")
        cursor.execute("SHOW fsync")
        if cursor.fetchone() != ("off",):
            cursor.execute("ALTER SYSTEM SET fsync = off")
            cursor.execute("ALTER SYSTEM SET full_page_writes = off")
            cursor.execute("ALTER SYSTEM SET synchronous_commit = off")
            cursor.execute("SELECT pg_reload_conf()")
        # to empty databases, and to end all their sessions
        cursor.execute(f"GRANT SET ON PARAMETER session_replication_role TO {ROLE}")
        cursor.execute(f"GRANT pg_signal_autovacuum_worker TO {ROLE}")
        cursor.execute("SELECT pg_advisory_unlock(hashtext('fsync'))")
        yield cursor


@pytest.fixture(scope="session")
def database_template(
    services: Settings, administrator: psycopg2.extensions.cursor, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Name of a database that has the schema and Dagster's tables, from which each test's database is cloned."""
    name = _template_name()
    administrator.execute("SELECT pg_advisory_lock(hashtext(%s))", [name])
    administrator.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name])
    if administrator.fetchone() is None:
        administrator.execute(f'DROP DATABASE IF EXISTS "{name}_unfinished"')
        administrator.execute(f'CREATE DATABASE "{name}_unfinished" OWNER {ROLE}')
        url = database_url(services, f"{name}_unfinished")
        asyncio.run(schema.apply_schema(url))
        home = tmp_path_factory.mktemp("template")
        own = services.model_copy(update={"home": home, "dagster_db_url": url})
        with DagsterInstance.from_config(str(embedded.dagster_home(own))) as instance:
            assert instance.get_runs_count() == 0  # each storage makes its tables when it is first used
            assert instance.event_log_storage
            assert instance.schedule_storage
        administrator.execute(f'ALTER DATABASE "{name}_unfinished" RENAME TO "{name}"')
    administrator.execute("SELECT pg_advisory_unlock(hashtext(%s))", [name])
    return name


@pytest.fixture(scope="session")
def databases(
    services: Settings, administrator: psycopg2.extensions.cursor, database_template: str
) -> Iterator[Databases]:
    """Empty databases with the schema, which the tests of this process use in turn."""
    owner = Databases(services, administrator, database_template)
    yield owner
    owner.close()


@pytest.fixture
def settings(services: Settings, databases: Databases, tmp_path: Path) -> Iterator[Settings]:
    """Settings of one test: its own database, bucket, shared volume, NATS names and state folder."""
    with _own_settings(services, databases, tmp_path) as own:
        yield own


@pytest.fixture(scope="module")
def module_settings(
    services: Settings, databases: Databases, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Settings]:
    """Like ``settings``, shared by the tests of a module."""
    with _own_settings(services, databases, tmp_path_factory.mktemp("module")) as own:
        yield own


@contextmanager
def _own_settings(services: Settings, databases: Databases, tmp_path: Path) -> Iterator[Settings]:
    with isolated(services, tmp_path, database=databases.one()) as own:
        yield own
        end_run_servers(embedded.run_server_folder(own))
        if (own.home / "services.json").exists():  # the test started servers of its own
            embedded.down(own)


@pytest.fixture
def months_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the log get partitions of later months, as outside of tests."""
    monkeypatch.setattr(schema, "PARTITIONS_AHEAD", PARTITIONS_AHEAD)


@pytest.fixture
def noetl(settings: Settings) -> Iterator[EngineProvider]:
    """The engine over a test's settings."""
    provider = EngineProvider(settings)
    yield provider
    provider.close()


@pytest.fixture
def own_services() -> Iterator[Settings]:
    """Servers of this test alone, which it may kill."""
    with tempfile.TemporaryDirectory(prefix="noetl-outages-") as folder:
        settings = Settings(home=Path(folder))
        yield embedded.ensure(settings, only=["postgres", "nats"])
        embedded.down(settings)


@pytest.fixture
async def pool(settings: Settings) -> AsyncIterator[asyncpg.Pool[Any]]:
    """A pool on the test's database, with the codecs of the event log."""
    assert settings.db_url is not None
    opened = await open_pool(settings.db_url, size=4)
    yield opened
    opened.terminate()


@pytest.fixture(scope="session")
def dagster_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of an empty Dagster instance, whose tables take longer to make than to copy."""
    folder = tmp_path_factory.mktemp("dagster")
    with _dagster_instance(folder) as instance:
        assert instance.get_runs_count() == 0
    return folder


@pytest.fixture
def dagster_instance(dagster_template: Path, tmp_path: Path) -> Iterator[DagsterInstance]:
    """A Dagster instance with storage of its own that child processes can open too."""
    folder = tmp_path / "dagster"
    shutil.copytree(dagster_template, folder)
    with _dagster_instance(folder) as instance:
        yield instance


def _dagster_instance(folder: Path) -> DagsterInstance:
    """Returns an instance on files; the events of all runs share one, as they share a table of PostgreSQL."""
    storage = {
        "module": ConsolidatedSqliteEventLogStorage.__module__,
        "class": ConsolidatedSqliteEventLogStorage.__name__,
        "config": {"base_dir": str(folder / "history")},
    }
    return DagsterInstance.local_temp(str(folder), overrides={"event_log_storage": storage})


@pytest.fixture(scope="session")
def sessions(services: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSessions]:
    """One Spark session for the whole process: starting one takes seconds."""
    own = Settings(
        home=tmp_path_factory.mktemp("spark-home"),
        spark_driver_memory="1g",
        spark_driver_java_options=SHORT_LIVED_JVM,
        spark_master="local[2]",
        # executors find what the s3 tier needs in their own environment
        spark_config={f"spark.executorEnv.{name}": value for name, value in aws_environment(services).items()},
    )
    owner = SparkSessions(own)
    yield owner
    owner.stop()


def aws_environment(settings: Settings) -> dict[str, str]:
    """The AWS environment that leads the s3 tier to the embedded object store."""
    return {
        "AWS_ENDPOINT_URL": settings.minio_endpoint or "",
        "AWS_ACCESS_KEY_ID": settings.minio_access_key,
        "AWS_SECRET_ACCESS_KEY": settings.minio_secret_key.get_secret_value(),
        "AWS_REGION": settings.minio_region,
        "AWS_DEFAULT_REGION": settings.minio_region,
    }


def _template_name() -> str:
    """Changes with the schema and with Dagster's, and monthly with the partitions that are made ahead."""
    sources = [*schema.schema_files(), Path(schema.__file__), Path(__file__)]
    contents = b"".join([dagster.__version__.encode(), *(path.read_bytes() for path in sources)])
    digest = hashlib.sha256(contents).hexdigest()[:12]
    return f"template-{datetime.now(UTC):%Y%m}-{digest}"


def _drop_leftovers() -> None:
    """Drops databases of killed sessions and templates of earlier schemas. Nobody else is connected now."""
    running = {one.name for one in embedded.status(Settings(home=HOME)) if one.running}
    if embedded.ServiceName.POSTGRES not in running:
        return
    services = embedded.ensure(Settings(home=HOME), only=["postgres"])
    with administering(superuser_url(services)) as cursor:
        cursor.execute("SELECT datname FROM pg_database WHERE datname ~ '^(test|template)-'")
        for (name,) in cursor.fetchall():
            if name != _template_name():
                cursor.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
