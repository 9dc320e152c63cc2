"""Backup and restore as docs/how-to/backup-and-restore.md describes them: dump, lose everything, restore, resume."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import psycopg2.extensions

from noetl_dagster import embedded
from noetl_dagster.embedded.isolation import _delete_streams
from noetl_dagster.embedded.postgres import ROLE, _programs
from noetl_dagster.events.connection import open_pool
from noetl_dagster.process.event_loop import cancel_and_wait
from noetl_dagster.settings import EventTransport, Settings
from noetl_dagster.storage.store import ResultStore
from tests import forked
from tests.embedded.peers import s3_client
from tests.ledger import assert_only_unfinished_ran_again, written_by
from tests.playbooks import text_of
from tests.processes import killed_in_the_end
from tests.service.conftest import serving
from tests.waiting import until

ITEMS, DUMPED, BEFORE_THE_END = 60, 15, 30

PLAYBOOK = text_of(
    "ledger",
    """
    workload: {items: 60, ledger: ""}
    workflow:
      - step: start
        tool: {kind: python, input: {n: "{{ items }}"}, code: "result = list(range(n))"}
        next: [write]
      - step: write
        loop: {in: "{{ start.data }}", iterator: n}
        spec: {loop_mode: fanout, dispatch: workers, fanout: {max_groups: 2, max_concurrent: 8}}
        tool: TOOL
        next: [total]
      - step: total
        tool: {kind: python, input: {items: "{{ write.results }}"}, code: "result = len(items)"}
    """,
).replace(
    "TOOL",
    written_by(
        # a third until the dump is there, a third after it, the last one when everything was restored
        "(begun > 20 and not path.with_name('more').exists() or begun > 40)",
        result="{'n': n, 'text': 'x' * 20_000}",  # above the inline limit: an object of the store
    ),
)

DONE = "SELECT current_index FROM noetl.event WHERE event_type = 'loop.shard.done'"


async def test_everything_is_lost_and_restored_and_the_execution_goes_on(
    settings: Settings, administrator: psycopg2.extensions.cursor, tmp_path: Path
) -> None:
    """The log is older than the objects, and no stream is restored: what ran after the dump runs again, once."""
    own = _noticing_soon(settings)
    playbook, ledger, backup = tmp_path / "ledger.yaml", tmp_path / "ledger.txt", tmp_path / "backup"
    playbook.write_text(PLAYBOOK)

    async with _working(own, tmp_path, "first") as environment:
        run = ["run", str(playbook), "--set", f"ledger={ledger}"]
        with killed_in_the_end() as start:
            driver = start(_command(*run), env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
            await _until_done(own, DUMPED, driver)
            await asyncio.to_thread(_dump, own, backup)
            await asyncio.to_thread(_copy_objects, own, backup / "objects")
            (tmp_path / "more").touch()
            await _until_done(own, BEFORE_THE_END, driver)
            os.killpg(driver.pid, signal.SIGKILL)
    await _lose(own, administrator)

    await asyncio.to_thread(_restore, own, administrator, backup)
    known = {row["current_index"] for row in await _asked(own, DONE)}
    assert DUMPED <= len(known) < BEFORE_THE_END
    (tmp_path / "go").touch()
    execution_id = str((await _asked(own, "SELECT min(execution_id) AS id FROM noetl.event"))[0]["id"])
    async with _working(own, tmp_path, "second") as environment:
        resumed = await _ran(environment, tmp_path, "resume", execution_id, "--json")
    assert resumed.returncode == 0, resumed.stderr

    overview = json.loads(resumed.stdout)
    assert overview["status"] == "COMPLETED"
    done = Counter(row["current_index"] for row in await _asked(own, DONE))
    assert done == dict.fromkeys(range(ITEMS), 1), "all items there once"
    assert_only_unfinished_ran_again(ledger, ITEMS, known)
    (total,) = (step for step in overview["steps"] if step["step"] == "total")
    assert total["data"] == ITEMS
    assert {value["n"] for value in await _stored(own)} == set(range(ITEMS))
    verified = await _ran(environment, tmp_path, "verify", "--all")
    assert verified.returncode == 0, verified.stdout + verified.stderr


def _noticing_soon(settings: Settings) -> Settings:
    """A worker that the log knows and nobody has seen since is missed in a test's time."""
    return settings.model_copy(
        update={
            "event_transport": EventTransport.NATS,
            "worker_heartbeat_seconds": 0.5,
            "command_heartbeat_seconds": 0.5,
            "command_heartbeat_timeout_seconds": 3.0,
        }
    )


@asynccontextmanager
async def _working(settings: Settings, folder: Path, worker: str) -> AsyncIterator[dict[str, str]]:
    """An API, a reaper and a worker until the block ends, which kills the worker; gives the environment of commands."""
    async with serving(settings) as service:
        environment = _environment(service.settings)
        reaping = asyncio.create_task(service.plane.engine.reaper().run(1.0))
        with killed_in_the_end() as start:
            with (folder / f"{worker}.log").open("w") as log:
                start(_command("worker", "--id", worker, "--slots", "4"), env=environment, stdout=log)
            yield environment
        await cancel_and_wait(reaping)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "noetl_dagster", *arguments]


def _environment(settings: Settings) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NOETL_")}
    return {**inherited, **embedded.environment(settings)}


async def _ran(environment: dict[str, str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        forked.run, "noetl-dagster", *arguments, environment=environment, folder=folder, texts=folder
    )


async def _until_done(settings: Settings, count: int, driver: subprocess.Popen[str]) -> None:
    async def done() -> bool:
        assert driver.poll() is None, driver.stdout.read() if driver.stdout else ""
        return len(await _asked(settings, DONE)) >= count

    await until(done, f"{count} items")


async def _asked(settings: Settings, query: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(settings.db_url)
    try:
        return await connection.fetch(query)
    finally:
        await connection.close()


def _dump(settings: Settings, folder: Path) -> None:
    """The event log, and Dagster's storage, which a test keeps in the same database."""
    folder.mkdir()
    _program("pg_dump", "--format=custom", f"--file={folder}/noetl.dump", settings.db_url or "")


def _restore(settings: Settings, administrator: psycopg2.extensions.cursor, folder: Path) -> None:
    address, _, name = (settings.db_url or "").rpartition("/")
    administrator.execute(f'CREATE DATABASE "{name}" OWNER {ROLE}')
    _program("pg_restore", "--exit-on-error", "--no-owner", f"--dbname={address}/{name}", f"{folder}/noetl.dump")
    _put_objects(settings, folder / "objects")


def _program(name: str, *arguments: str) -> None:
    done = subprocess.run([_programs() / name, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def _lose(settings: Settings, administrator: psycopg2.extensions.cursor) -> None:
    """The database, the streams, the buckets of NATS and of the object store."""
    name = (settings.db_url or "").rpartition("/")[2]
    administrator.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
    await _delete_streams(settings)
    await _remove_objects(settings)


async def _remove_objects(settings: Settings) -> None:
    await asyncio.to_thread(s3_client(settings).delete_bucket, Bucket=settings.minio_bucket)


def _copy_objects(settings: Settings, folder: Path) -> None:
    client = s3_client(settings)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=settings.minio_bucket):
        for one in page.get("Contents", ()):
            path = folder / one["Key"]
            path.parent.mkdir(parents=True, exist_ok=True)
            client.download_file(settings.minio_bucket, one["Key"], str(path))


def _put_objects(settings: Settings, folder: Path) -> None:
    client = s3_client(settings)
    client.create_bucket(Bucket=settings.minio_bucket)
    for path in folder.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), settings.minio_bucket, str(path.relative_to(folder)))


async def _stored(settings: Settings) -> list[Any]:
    """The values of the items; one that ran again may have two."""
    pool = await open_pool(settings.db_url or "", size=2)
    try:
        async with ResultStore(settings, pool) as store:
            rows = await pool.fetch("SELECT ref FROM noetl.result_ref WHERE source_step = 'write' AND kind = 'object'")
            values = [await store.get(row["ref"]) for row in rows]
            return [value for value in values if isinstance(value, dict) and "n" in value]
    finally:
        await pool.close()
