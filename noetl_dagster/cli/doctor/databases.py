"""The event log and Dagster's storage."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import asyncpg

from noetl_dagster.cli.doctor.finding import (
    Check,
    Finding,
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
from noetl_dagster.settings import Settings

CONNECT_SECONDS = 10.0

OLDEST_SERVER = 13
"""Events are read in commit order by ``xid8``, which PostgreSQL has from this version on."""

DAGSTER_SECONDS = 60.0
"""Importing Dagster is part of it."""


def database_checks(settings: Settings) -> Iterator[Check]:
    async def event_log() -> Finding:
        return await _event_log(settings)

    async def dagster() -> Finding:
        return await _dagster(settings)

    yield Check("event log", event_log, "check NOETL_DB_URL: host, port, user, password and database")
    yield Check(
        "Dagster's storage",
        dagster,
        "check NOETL_DAGSTER_DB_URL, or dagster.yaml in DAGSTER_HOME",
        DAGSTER_SECONDS,
    )


async def _event_log(settings: Settings) -> Finding:
    if settings.db_url is None:
        return wrong("no database", "set NOETL_DB_URL, or NOETL_EMBEDDED=true")
    async with _connected(settings.db_url) as connection:
        server = f"PostgreSQL {_version(connection)} at {place_of(settings.db_url)}"
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
        return await in_background(lambda: _instance(home))
    if settings.dagster_db_url is None:
        return not_set("NOETL_DAGSTER_DB_URL and DAGSTER_HOME")
    async with _connected(settings.dagster_db_url) as connection:
        server = f"PostgreSQL {_version(connection)} at {place_of(settings.dagster_db_url)}"
        made = await connection.fetchval("SELECT to_regclass('runs') IS NOT NULL")
    return ok(server if made else f"{server}, empty: the first run makes its tables")


def _instance(home: str) -> Finding:
    from dagster import DagsterInstance

    with DagsterInstance.get() as instance:
        count = instance.get_runs_count()
        return ok(f"DAGSTER_HOME={home}, {type(instance.run_storage).__name__}, {count} runs")


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Any]:
    check_certificates(url)
    connection = await asyncpg.connect(url, timeout=CONNECT_SECONDS)
    try:
        yield connection
    finally:
        await connection.close(timeout=CONNECT_SECONDS)


def _version(connection: Any) -> str:
    version = connection.get_server_version()
    return f"{version.major}.{version.minor}"
