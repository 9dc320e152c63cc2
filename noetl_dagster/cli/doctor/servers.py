"""Checks of servers: databases, NATS, the HTTP API, the collector of traces and Kubernetes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
from nats.js.errors import APIError, ServiceUnavailableError

from noetl_dagster.cli.doctor.finding import (
    DAGSTER_REMEDY,
    SECONDS,
    Check,
    Finding,
    connects,
    in_background,
    not_set,
    ok,
    place_of,
    warning,
    wrong,
)
from noetl_dagster.errors import ServiceError
from noetl_dagster.events.connection import check_certificates
from noetl_dagster.events.schema import SCHEMA_VERSION, found_schema, partition_name, partitions
from noetl_dagster.events.transport.http import ApiClient
from noetl_dagster.events.transport.nats import check_stream, connect
from noetl_dagster.process.tracing.exporter import try_collector
from noetl_dagster.settings import EventTransport, Settings

CONNECT_SECONDS = 5.0
DATABASE_SECONDS = 10.0

DAGSTER_SECONDS = 60.0
"""Includes the import of Dagster."""

OLDEST_SERVER = 13
"""Events are read in commit order by ``xid8``, which PostgreSQL has from this version on."""

ANYBODYS = "/api/executions/0/lifecycle"
"""A path that is open to tokens of every scope; the execution does not exist."""

SERVICE_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
"""Every pod knows the cluster's address; only a pod with this file may use it."""


def server_checks(settings: Settings) -> Iterator[Check]:
    """Yields the checks of the databases, NATS, the HTTP API, the collector of traces and Kubernetes."""
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
    yield Check("Kubernetes", _kubernetes, "check KUBECONFIG, or the service account of the pod")


async def _nats(settings: Settings) -> Finding:
    if settings.nats_url is None:
        return not_set("NOETL_NATS_URL")
    impatient = settings.model_copy(update={"nats_connect_seconds": CONNECT_SECONDS})
    client = await connect(impatient, "doctor")
    try:
        version = client.connected_server_version
        server = f"NATS {version.major}.{version.minor} at {place_of(settings.nats_url)}"
        stream = client.jetstream(timeout=CONNECT_SECONDS)
        try:
            await stream.account_info()
        except (ServiceUnavailableError, APIError) as error:
            return wrong(f"{server} has no JetStream: {error}", "start it with --jetstream")
        exists, differences = await check_stream(stream, client.names)
    finally:
        await client.close()
    if differences:
        return warning(
            f"{server}: {'; '.join(differences)}", "edit the stream, or delete it once it is empty"
        )
    if not exists:
        return ok(f"{server}, JetStream; 'noetl-dagster serve' will make {client.names.event_stream}")
    return ok(f"{server}, JetStream with its stream")


async def _api(settings: Settings) -> Finding:
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
        return wrong(
            f"{where} does not accept the token", "set NOETL_SERVER_TOKEN to one of NOETL_SERVICE_TOKENS"
        )
    return ok(f"{where} is ready")


async def _traces(settings: Settings) -> Finding:
    if settings.tracing_endpoint is None:
        return not_set("NOETL_TRACING_ENDPOINT")
    where = f"collector at {place_of(settings.tracing_endpoint)}"
    try:
        said = await in_background(partial(try_collector, settings.tracing_endpoint, CONNECT_SECONDS))
    except ImportError:
        return wrong("OpenTelemetry is missing", "install noetl-dagster[tracing]")
    if said is None:
        return ok(f"{where} takes traces")
    try:
        secure = settings.tracing_endpoint.startswith("https:")
        await connects(settings.tracing_endpoint, 443 if secure else 80)
    except OSError as error:
        said = f"no server answers there: {error}"
    return wrong(f"{where} takes no traces: {said[:300]}", "check NOETL_TRACING_ENDPOINT, and that it is up")


async def _kubernetes() -> Finding:
    default = Path.home() / ".kube" / "config"
    if not ({"KUBECONFIG", "KUBERNETES_SERVICE_HOST"} & os.environ.keys() or default.is_file()):
        return not_set("KUBECONFIG")
    if not ("KUBECONFIG" in os.environ or default.is_file() or await in_background(SERVICE_TOKEN.is_file)):
        return not_set("the pod's service account token")
    return await in_background(_cluster)


def _cluster() -> Finding:
    try:
        from kubernetes import client, config
    except ImportError:
        return wrong("the Kubernetes client is missing", "install noetl-dagster[k8s]")
    configuration = client.Configuration()
    configuration.retries = 0
    try:
        config.load_kube_config(client_configuration=configuration)
    except config.ConfigException:
        config.load_incluster_config(client_configuration=configuration)
    with client.ApiClient(configuration) as api:
        version = client.VersionApi(api).get_code(_request_timeout=CONNECT_SECONDS)
    return ok(f"Kubernetes {version.git_version} at {place_of(configuration.host)}")


async def _event_log(settings: Settings) -> Finding:
    if settings.db_url is None:
        return wrong("no database", "set NOETL_DB_URL, or NOETL_EMBEDDED=true")
    async with _connected(settings.db_url) as (connection, server):
        if connection.get_server_version().major < OLDEST_SERVER:
            return wrong(f"{server} is too old", f"use PostgreSQL {OLDEST_SERVER} or later")
        try:
            found = await found_schema(connection)
        except ServiceError as error:
            what, _, remedy = str(error).partition(": ")
            return wrong(what, remedy)
        applies = "'noetl-dagster provision' or serve applies it"
        if found is None:
            return warning(f"{server} has no schema yet", applies)
        if found.number > SCHEMA_VERSION:
            return warning(f"{server} has a later schema, {found.number}", "update this version at some time")
        if not found.serves:
            return warning(f"{server} has the schema of an earlier version, {found.number}", applies)
        if not await connection.fetchval("SELECT has_table_privilege('noetl.event', 'SELECT, INSERT')"):
            return wrong(
                f"{server}: the user may not write noetl.event", "grant SELECT and INSERT on schema noetl"
            )
        if partition_name(datetime.now(UTC)) not in await partitions(connection):
            return warning(f"{server} has no partition for this month", "'noetl-dagster maintain' makes it")
    return ok(f"{server}, schema {found.number}, up to date")


async def _dagster(settings: Settings) -> Finding:
    if home := os.environ.get("DAGSTER_HOME"):
        return await in_background(partial(_instance, home))
    if settings.dagster_db_url is None:
        return not_set("NOETL_DAGSTER_DB_URL and DAGSTER_HOME")
    async with _connected(settings.dagster_db_url) as (connection, server):
        made = await connection.fetchval("SELECT to_regclass('runs') IS NOT NULL")
    return ok(server if made else f"{server}, empty: the first run makes its tables")


def _instance(home: str) -> Finding:
    from dagster import DagsterInstance

    with DagsterInstance.get() as instance:
        count = instance.get_runs_count()
        return ok(f"DAGSTER_HOME={home}, {type(instance.run_storage).__name__}, {count} runs")


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[tuple[Any, str]]:
    """Connects to a database, and yields the connection and the server's version and place."""
    check_certificates(url)
    connection = await asyncpg.connect(url, timeout=DATABASE_SECONDS)
    try:
        version = connection.get_server_version()
        yield connection, f"PostgreSQL {version.major}.{version.minor} at {place_of(url)}"
    finally:
        await connection.close(timeout=DATABASE_SECONDS)
