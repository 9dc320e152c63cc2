"""Checks of servers (databases, NATS, the HTTP API, traces), stores, Spark, folders and playbook code."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nats.js.errors import APIError, ServiceUnavailableError

from noetl_dagster.cli.doctor import (
    DAGSTER_REMEDY,
    SECONDS,
    Check,
    CheckResult,
    connects,
    in_background,
    not_set,
    ok,
    place_of,
    warning,
    wrong,
)
from noetl_dagster.errors import ServiceError
from noetl_dagster.events.connection import connect as connect_to_database
from noetl_dagster.events.ids import snowflake_floor
from noetl_dagster.events.schema import SCHEMA_VERSION, found_schema, partitions
from noetl_dagster.events.transport.http import ApiClient
from noetl_dagster.events.transport.nats import check_stream, connect
from noetl_dagster.extras import needs_extra
from noetl_dagster.playbook.catalog import find_playbooks
from noetl_dagster.settings import EventTransport, Settings, StoreTier
from noetl_dagster.storage.tiers import configured, probe
from noetl_dagster.tools.commands.processes import confinement, run_process

CONNECT_SECONDS = 5.0

OTHER_VARIABLES = re.compile(r"NOETL_(CREDENTIAL_|TEST_).*|NOETL_INPUT|NOETL(_.*)?_(SERVICE|PORT)(_.*)?")
"""Variables of credentials, of tests, of commands, and of Kubernetes, which names the ports of services."""

VARIABLES_REMEDY = "correct or remove them; 'noetl-dagster settings' lists the settings"

CODE_REMEDY = "check NOETL_PLAYBOOK_USER: that user must be able to read the installation"
DATABASE_SECONDS = 10.0

DAGSTER_SECONDS = 60.0
"""Includes the import of Dagster."""

OLDEST_SERVER = 15
"""The oldest supported version of PostgreSQL. Events are read in commit order by ``xid8``, which came with 13."""

ANYBODYS = "/api/executions/0/lifecycle"
"""A path that is open to tokens of every scope; the execution does not exist."""


def server_checks(settings: Settings) -> Iterator[Check]:
    """Yields the checks of the databases, NATS, the HTTP API and the collector of traces."""
    for name, run, remedy, seconds in (
        ("event log", _event_log, "check NOETL_DB_URL: host, port, user, password and database", SECONDS),
        ("Dagster's storage", _dagster, DAGSTER_REMEDY, DAGSTER_SECONDS),
        ("NATS", _nats, "check NOETL_NATS_URL (with user and password) and NOETL_NATS_CA", SECONDS),
        (
            "HTTP API",
            _api,
            "check NOETL_SERVER_URL and NOETL_SERVER_CA, or start 'noetl-dagster serve'",
            SECONDS,
        ),
        ("traces", _traces, "check NOETL_TRACING_ENDPOINT and OTEL_EXPORTER_OTLP_*", SECONDS),
    ):
        yield Check(name, partial(run, settings), remedy, seconds)


async def _nats(settings: Settings) -> CheckResult:
    if settings.nats_url is None:
        return not_set("NOETL_NATS_URL")
    client = await connect(settings, "doctor", seconds=CONNECT_SECONDS)
    try:
        version = client.connected_server_version
        server = f"NATS {version.major}.{version.minor} at {','.join(map(place_of, settings.nats_servers))}"
        stream = client.jetstream(timeout=CONNECT_SECONDS)
        try:
            await stream.account_info()
        except (ServiceUnavailableError, APIError) as error:
            remedy = "start it with --jetstream; if its disk was full, restart it"
            return wrong(f"{server} has no JetStream: {error}", remedy)
        exists, differences = await check_stream(stream, client.names)
    finally:
        await client.close()
    if differences:
        return warning(f"{server}: {'; '.join(differences)}", "edit the stream, or delete it if empty")
    if not exists:
        return ok(f"{server}, JetStream; 'noetl-dagster serve' will create {client.names.event_stream}")
    return ok(f"{server}, JetStream with its stream")


async def _api(settings: Settings) -> CheckResult:
    used = settings.event_transport is not EventTransport.DIRECT
    if not used and "server_url" not in settings.model_fields_set:
        return not_set("NOETL_SERVER_URL")
    client = ApiClient(settings)
    where = f"HTTP API at {place_of(settings.server_url)}"
    try:
        ready = await client.request("GET", "/ready", patience=0)
        answer = await client.request("GET", ANYBODYS, patience=0)
    finally:
        await client.close()
    if ready.is_error:
        return wrong(f"{where} is not ready: {ready.text[:300]}", "see the log of 'noetl-dagster serve'")
    if answer.status in (401, 403):
        remedy = "set NOETL_SERVER_TOKEN to one of its NOETL_SERVICE_TOKENS"
        return wrong(f"{where} does not accept the token", remedy)
    return ok(f"{where} is ready")


async def _traces(settings: Settings) -> CheckResult:
    if settings.tracing_endpoint is None:
        return not_set("NOETL_TRACING_ENDPOINT")
    where = f"collector at {place_of(settings.tracing_endpoint)}"
    try:
        from noetl_dagster.process.otlp import try_collector

        answer = await in_background(partial(try_collector, settings.tracing_endpoint, CONNECT_SECONDS))
    except ImportError:
        return wrong("OpenTelemetry is missing", needs_extra("tracing", "tracing"))
    if answer is None:
        return ok(f"{where} accepts traces")
    try:
        secure = settings.tracing_endpoint.startswith("https:")
        await connects(settings.tracing_endpoint, 443 if secure else 80)
    except OSError as error:
        answer = f"no server answers there: {error}"
    return wrong(f"{where} does not accept traces: {answer[:300]}", "check NOETL_TRACING_ENDPOINT, and that it is up")


async def _event_log(settings: Settings) -> CheckResult:
    if settings.db_url is None:
        return wrong("no database", "set NOETL_DB_URL, or NOETL_EMBEDDED=true")
    async with _connected(settings.db_url) as (connection, server):
        if connection.get_server_version().major < OLDEST_SERVER:
            return wrong(f"{server} is too old", f"use PostgreSQL {OLDEST_SERVER} or later")
        try:
            schema = await found_schema(connection)
        except ServiceError as error:
            what, _, remedy = str(error).partition(": ")
            return wrong(what, remedy)
        applies = "'noetl-dagster provision' or serve applies it"
        if schema is None:
            return warning(f"{server} has no schema yet", applies)
        if schema.number > SCHEMA_VERSION:
            return warning(f"{server} has a later schema, {schema.number}", "update this version")
        if not schema.serves:
            return warning(f"{server} has the schema of an earlier version, {schema.number}", applies)
        if not await connection.fetchval("SELECT has_table_privilege('noetl.event', 'SELECT, INSERT')"):
            remedy = "grant SELECT and INSERT on schema noetl"
            return wrong(f"{server}: the user is not allowed to write noetl.event", remedy)
        now = snowflake_floor(datetime.now(UTC))
        if not any(ids and now in ids for ids in (await partitions(connection)).values()):
            return warning(f"{server} has no partition for new executions", "'noetl-dagster maintain' creates it")
    return ok(f"{server}, schema {schema.number}, up to date")


async def _dagster(settings: Settings) -> CheckResult:
    if home := os.environ.get("DAGSTER_HOME"):
        return await in_background(partial(_instance, home))
    if settings.dagster_db_url is None:
        return not_set("NOETL_DAGSTER_DB_URL and DAGSTER_HOME")
    async with _connected(settings.dagster_db_url) as (connection, server):
        made = await connection.fetchval("SELECT to_regclass('runs') IS NOT NULL")
    return ok(server if made else f"{server}, empty: the first run creates its tables")


def _instance(home: str) -> CheckResult:
    from dagster import DagsterInstance

    with DagsterInstance.get() as instance:
        count = instance.get_runs_count()
        return ok(f"DAGSTER_HOME={home}, {type(instance.run_storage).__name__}, {count} runs")


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[tuple[Any, str]]:
    """Connects to a database, and yields the connection and the server's version and place."""
    connection = await connect_to_database(url, timeout=DATABASE_SECONDS)
    try:
        version = connection.get_server_version()
        yield connection, f"PostgreSQL {version.major}.{version.minor} at {place_of(url)}"
    finally:
        await connection.close(timeout=DATABASE_SECONDS)


STORES = {
    StoreTier.MINIO: "check NOETL_MINIO_ENDPOINT, _ACCESS_KEY, _SECRET_KEY and _BUCKET",
    StoreTier.S3: "check NOETL_S3_BUCKET and the AWS_* variables",
    StoreTier.GCS: "check NOETL_GCS_BUCKET, NOETL_GCS_ENDPOINT and GOOGLE_APPLICATION_CREDENTIALS",
    StoreTier.PVC: "check NOETL_PVC_MOUNT_PATH and who may write there",
}
"""The remedy of each tier."""

STORE_SECONDS = 30.0
"""A client retries for some seconds before it reports that there is no answer."""


def store_checks(settings: Settings) -> Iterator[Check]:
    """Yields the checks of the stores of results."""
    for tier, remedy in STORES.items():
        yield Check(f"store {tier}", partial(_store, tier, settings), remedy, STORE_SECONDS)


async def _store(tier: StoreTier, settings: Settings) -> CheckResult:
    if tier not in configured(settings):
        if tier is settings.default_store_tier:
            return wrong("NOETL_DEFAULT_STORE_TIER, but not set up", STORES[tier])
        return not_set(STORES[tier].removeprefix("check ").partition(",")[0].partition(" and ")[0])
    return ok(f"wrote, read and removed an object in {await probe(tier, settings)}")


OLDEST_JAVA = 17
JAVA_REMEDY = f"install Java {OLDEST_JAVA} or newer, or set JAVA_HOME"
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)[^"]*"')

CONNECT_PORT, MASTER_PORT, API_PORT = 15002, 7077, 443


def program_checks(settings: Settings) -> Iterator[Check]:
    """Yields the checks of Spark, Java, the folders and the confinement of the code of playbooks."""
    yield Check("Spark", partial(_spark, settings), "check NOETL_SPARK_MASTER or NOETL_SPARK_REMOTE")
    yield Check("Java", partial(find_java, settings), JAVA_REMEDY)
    yield Check("playbooks", partial(_playbooks, settings), "check NOETL_PLAYBOOKS_PATH")
    yield Check("secrets file", partial(_secrets_file, settings), "check NOETL_SECRETS_PATH")
    yield Check("playbook code", partial(_playbook_code, settings), CODE_REMEDY)
    yield Check("variables", _variables, VARIABLES_REMEDY)


async def _variables() -> CheckResult:
    """Finds variables that look like settings and are none, such as misspelt ones."""
    settings_names = [f"NOETL_{name}".upper() for name in Settings.model_fields]
    ours = sorted(name for name in os.environ if name.startswith("NOETL_"))
    unknown = [name for name in ours if name not in settings_names and not OTHER_VARIABLES.fullmatch(name)]
    if not unknown:
        return ok(f"{len(ours)} variables NOETL_* are set")
    nearest = [difflib.get_close_matches(name, settings_names, 1, 0.8) for name in unknown]
    shown = [f"{name} (did you mean {near[0]}?)" if near else name for name, near in zip(unknown, nearest, strict=True)]
    return warning(f"unknown, and ignored: {', '.join(shown[:10])}", VARIABLES_REMEDY)


async def _spark(settings: Settings) -> CheckResult:
    from noetl_dagster.spark.sessions import check_address

    try:
        own = f"pyspark {version('pyspark')}"
    except PackageNotFoundError:
        return not_set("pyspark is not installed; steps of kind spark need it; reinstall noetl-dagster")
    check_address(settings)
    address = settings.spark_address
    if settings.spark_remote is not None:
        return ok(f"{own}, Spark Connect at {await connects(address, CONNECT_PORT)} answers")
    if address.startswith("spark://"):
        first = address.partition(",")[0]
        return ok(f"{own}, master at {await connects(first, MASTER_PORT)} answers")
    if address.startswith("k8s://"):
        url = address.removeprefix("k8s://")
        place = await connects(url if "://" in url else f"https://{url}", API_PORT)
        return ok(f"{own}, Kubernetes at {place}")
    return ok(f"{own}, {address}")


async def find_java(settings: Settings) -> CheckResult:
    """Finds the Java that Spark would use; a Java that cannot run Spark has a remedy."""
    if settings.spark_remote is not None:
        return not_set("Spark Connect needs none here")
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not os.access(java, os.X_OK):
        if home:
            return wrong(f"JAVA_HOME={home} has no bin/java", JAVA_REMEDY)
        return warning("no java on the PATH: steps of kind spark cannot run", JAVA_REMEDY)
    run = partial(subprocess.run, [java, "-version"], capture_output=True, errors="replace", timeout=SECONDS)
    done = await in_background(run)
    text = done.stderr + done.stdout
    version = _JAVA_VERSION.search(text)
    if version is None:
        return wrong(f"{java} reports no version: {text.strip()[:200]}", JAVA_REMEDY)
    if int(version[1]) < OLDEST_JAVA:
        return wrong(f"Java {version[1]} at {java} is too old", JAVA_REMEDY)
    return ok(f"Java {version[1]} at {java}")


async def _playbook_code(settings: Settings) -> CheckResult:
    if settings.playbook_user is None:
        return not_set("NOETL_PLAYBOOK_USER")
    confined = confinement(settings)
    with confined.private_folder("noetl-doctor-") as folder:
        ready = [sys.executable, "-c", "import orjson"]
        env = {"PATH": os.defpath, **confined.variables(folder)}
        done = await run_process(ready, env=env, folder=folder, confined=confined)
    if done.exit_code:
        return wrong(f"confined Python code cannot start: {str(done.stderr).strip()[-200:]}", CODE_REMEDY)
    return ok(f"playbook code runs as the user {settings.playbook_user}")


async def _playbooks(settings: Settings) -> CheckResult:
    folder = settings.playbooks_path
    if not folder.is_dir():
        if "playbooks_path" in settings.model_fields_set:
            return wrong(f"{folder.absolute()} is not a folder", "correct NOETL_PLAYBOOKS_PATH")
        return not_set("NOETL_PLAYBOOKS_PATH, and no folder 'playbooks' here")
    count = len(await in_background(lambda: find_playbooks(folder)))
    return ok(f"{count} in {folder.absolute()}; 'noetl-dagster check {folder}' reads them")


async def _secrets_file(settings: Settings) -> CheckResult:
    path = settings.secrets_path
    if not path.is_dir():
        if "secrets_path" in settings.model_fields_set:
            return wrong(f"{path} is no folder", "mount it, or correct NOETL_SECRETS_PATH")
        return not_set("NOETL_SECRETS_PATH")
    if not os.access(path, os.R_OK | os.X_OK):
        return wrong(f"{path} may not be read", "let this user read it")
    return ok(f"{sum(one.is_file() for one in path.iterdir())} files in {path}")
