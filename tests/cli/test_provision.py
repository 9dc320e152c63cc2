"""``provision``: everything is made, twice, by two at once, and what cannot be made is said."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import asyncpg

from noetl_dagster import embedded
from noetl_dagster.settings import Settings
from tests import forked
from tests.cli.conftest import COMMAND
from tests.waiting import PROCESS_SECONDS

IMPATIENT = """
from noetl_dagster import cli
from noetl_dagster.events.transport import nats
nats.CONNECT_SECONDS = 0.2
cli.main()
"""
FORGET = """
DROP SCHEMA noetl CASCADE; DROP SCHEMA public CASCADE; CREATE SCHEMA public
"""


def environment(settings: Settings, **more: str) -> dict[str, str]:
    given = {**os.environ, **embedded.environment(settings), "NOETL_EMBEDDED": "false", **more}
    given.pop("DAGSTER_HOME", None)
    return given


def provisioning(given: dict[str, str], wait: str = "60", *more: str) -> Any:
    command = [*COMMAND, "provision", "--wait", wait, *more]
    return forked.start(command, env=given, stdout=subprocess.PIPE, text=True)


def told(process: Any) -> list[str]:
    said: str = process.communicate(timeout=PROCESS_SECONDS)[0]
    return said.splitlines()


def test_two_at_once_make_everything_and_a_third_finds_it(settings: Settings) -> None:
    async def forget() -> None:
        connection = await asyncpg.connect(settings.db_url)
        await connection.execute(FORGET)
        await connection.close()

    asyncio.run(forget())
    given = environment(settings)
    both = [provisioning(given) for _ in range(2)]
    lines = [told(process) for process in both]
    assert [process.returncode for process in both] == [0, 0], lines
    made = Counter(line.split()[0] for one in lines for line in one if "schema noetl" in line)
    assert made == {"made": 1, "there": 1}
    made = Counter(line.split()[0] for one in lines for line in one if "Dagster's storage" in line)
    assert made == {"made": 1, "there": 1}
    third = provisioning(given)
    found = told(third)
    assert third.returncode == 0, found
    assert {line.split()[0] for line in found} == {"there"}
    for thing in ("stream ", "consumer ", "store kv", "store minio", "partitions of noetl.event"):
        assert any(thing in line for line in found), (thing, found)


async def test_locked_tables_are_left_alone_and_their_holders_named(settings: Settings) -> None:
    """Nothing is changed, nobody waits behind it for long, and the next attempt succeeds."""
    given = environment(settings)
    session = {"application_name": "report"}
    holder, onlooker = [await asyncpg.connect(settings.db_url, server_settings=session) for _ in range(2)]
    await onlooker.execute("UPDATE noetl.schema_version SET number = 1")
    said = {
        "noetl.queue": "event log: the schema of the event log",
        "alembic_version": "Dagster's storage was not changed",
    }
    for table in said:
        async with holder.transaction():
            await holder.execute(f"LOCK TABLE {table}")
            refused = provisioning(given, "60", "--lock-wait", "1")
            lines = await asyncio.to_thread(told, refused)
            assert refused.returncode == 1, lines
            [line] = [line for line in lines if line.startswith("refused")]
            assert said[table] in line
            assert f"process {holder.get_server_pid()} (report, idle in transaction, " in line
            assert f"LOCK TABLE {table}" in line
            if table == "noetl.queue":
                assert await onlooker.fetchval("SELECT number FROM noetl.schema_version") == 1
    again = provisioning(given)
    assert not (await asyncio.to_thread(lambda: again.wait(PROCESS_SECONDS)))
    await holder.close()
    await onlooker.close()


def test_what_cannot_be_reached_is_refused_with_a_remedy(settings: Settings) -> None:
    away = {"NOETL_NATS_URL": "nats://127.0.0.1:1", "NOETL_MINIO_ENDPOINT": "http://127.0.0.1:1"}
    command = [sys.executable, "-c", IMPATIENT, "provision", "--wait", "0"]
    process = forked.start(command, env=environment(settings, **away), stdout=subprocess.PIPE, text=True)
    lines = told(process)
    assert process.returncode == 1, lines
    refused = [line for line in lines if line.startswith("refused")]
    assert any("check NOETL_NATS_URL" in line for line in refused), lines
    assert any("store minio" in line for line in refused), lines
    assert any(line.startswith("there    Dagster's storage") for line in lines), lines


def test_a_database_that_nobody_answers_for_is_named_with_its_address(settings: Settings) -> None:
    away = event_log(environment(settings, NOETL_DB_URL="postgresql://u:hush@127.0.0.1:1/x"), wait="0")
    assert "no server answers at 127.0.0.1:1/x: " in away
    assert "check host and port" in away
    assert "hush" not in away


def test_a_certificate_that_is_not_there_is_named_and_not_waited_for(settings: Settings) -> None:
    url = f"{settings.db_url}?sslmode=verify-full&sslrootcert=/none.crt"
    missing = event_log(environment(settings, NOETL_DB_URL=url), wait=str(2 * PROCESS_SECONDS))
    assert "sslrootcert of the database's address: there is no file /none.crt" in missing


def event_log(given: dict[str, str], wait: str) -> str:
    """What provisioning says of the event log."""
    (line,) = (one for one in told(provisioning(given, wait)) if "event log" in one)
    return line
