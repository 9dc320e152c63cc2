"""Point-in-time recovery with archived WAL: the log goes back, the objects do not."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from noetl_dagster import embedded
from noetl_dagster.embedded.postgres import administering
from noetl_dagster.engine.engine import Engine
from noetl_dagster.engine.recovery.verify import Report, forget_missing, verify
from noetl_dagster.settings import Settings, StoreTier
from tests.databases import superuser_url
from tests.playbooks import playbook
from tests.waiting import until

pytestmark = pytest.mark.slow

PLAYBOOK = """
workload: {folder: ""}
workflow:
  - step: load
    loop: {in: "{{ range(20) | list }}", iterator: n, mode: parallel}
    tool:
      kind: python
      input: {n: "{{ n }}", folder: "{{ workload.folder }}"}
      code: |
        with open(f"{folder}/ledger", "a") as ledger:
            ledger.write(f"{n} ")
        result = {"n": n, "text": "x" * 20_000}
    next: [total]
  - step: total
    tool:
      kind: python
      input: {loaded: "{{ load.results }}", folder: "{{ workload.folder }}"}
      code: |
        from pathlib import Path
        if not Path(folder, "go").exists():
            raise ValueError("not yet")
        result = sum(one["n"] for one in loaded)
"""
ARCHIVED = "SELECT last_archived_wal >= %s FROM pg_stat_archiver"


@pytest.fixture
def own_servers(tmp_path: Path) -> Iterator[Settings]:
    """PostgreSQL and an object store of this test alone."""
    home = tmp_path / "home"
    yield Settings(home=home)
    embedded.down(Settings(home=home))


async def test_the_log_goes_back_and_missing_results_are_made_again(own_servers: Settings, tmp_path: Path) -> None:
    data, backup = own_servers.home / "postgres" / "data", tmp_path / "backup"
    started(own_servers)
    await asyncio.to_thread(begin_to_archive, own_servers, data)
    await asyncio.to_thread(back_up, started(own_servers), data, backup)

    async with working(started(own_servers)) as engine:
        failed = await engine.run(playbook(PLAYBOOK), {"folder": str(tmp_path)})
        assert failed.status == "FAILED"
        last = await asyncio.to_thread(mark, own_servers, "before")
        (tmp_path / "go").touch()
        completed = await engine.resume(failed.execution_id)
        assert completed.latest["total"].envelope["data"] == 190
        later = await engine.run(playbook(PLAYBOOK, "later"), {"folder": str(tmp_path)})
        await until_archived(own_servers, last)
        rows = await engine.runtime.pool.fetch(
            "SELECT physical_uri FROM noetl.result_ref WHERE source_step = 'load' AND execution_id = $1 "
            "AND store_tier = 'minio' ORDER BY ref_id LIMIT 3",
            failed.execution_id,
        )
        tier = engine.runtime.results._placement.tier(StoreTier.MINIO)
        for row in rows:
            await tier.delete(row["physical_uri"])
        assert len(rows) == 3
        ahead = [keys async for keys in tier.keys(f"exec/{later.execution_id}/")]
        assert ahead
    begun = Counter((tmp_path / "ledger").read_text().split())

    await asyncio.to_thread(restore, own_servers, data, backup)
    async with working(started(own_servers)) as engine:
        report = await checked(engine)
        assert report.executions == 1, "the log does not know the later execution"
        assert report.findings.counts == {"object.missing": 3}
        assert (await engine.runtime.state(failed.execution_id)).status == "FAILED"

        forgotten = await forget_missing(engine.runtime, report.missing)
        assert forgotten.executions == [failed.execution_id]
        resumed = await engine.resume(failed.execution_id)

        assert resumed.status == "COMPLETED", resumed.error
        assert resumed.latest["total"].envelope["data"] == 190
        again = Counter((tmp_path / "ledger").read_text().split()) - begun
        assert (len(again), set(again.values())) == (3, {1})
        assert (await checked(engine)).is_clean


def started(settings: Settings) -> Settings:
    """Settings with the addresses of the servers, which it starts."""
    return embedded.ensure(settings, ["postgres", "object_store"])


@asynccontextmanager
async def working(settings: Settings) -> AsyncIterator[Engine]:
    engine = await Engine.open(settings)
    try:
        yield engine
    finally:
        await engine.close()


async def checked(engine: Engine) -> Report:
    await engine.projecting.close()
    return await verify(engine.runtime.pool, engine.runtime.results)


def begin_to_archive(settings: Settings, data: Path) -> None:
    """Archives the WAL into a folder that the user of the server may write, and restarts the server."""
    archive = data / "archive"
    archive.mkdir()
    as_owner_of(data, archive)
    with administering(superuser_url(settings)) as cursor:
        for setting in ("archive_mode = on", "archive_command = 'cp %p archive/%f'", "wal_level = replica"):
            cursor.execute(f"ALTER SYSTEM SET {setting}")
    embedded.down(settings)


def back_up(settings: Settings, data: Path, folder: Path) -> None:
    """Copies the files of the running server, as PostgreSQL's low-level base backup."""
    with administering(superuser_url(settings)) as cursor:
        cursor.execute("SELECT pg_backup_start('test', true)")
        shutil.copytree(data, folder, ignore=shutil.ignore_patterns("archive", "postmaster.*", "pg_wal"))
        cursor.execute("SELECT labelfile FROM pg_backup_stop(true)")
        (folder / "backup_label").write_text(cursor.fetchone()[0])
    (folder / "pg_wal").mkdir()


def mark(settings: Settings, name: str) -> str:
    """Names a point in time, and returns the WAL file that contains it."""
    with administering(superuser_url(settings)) as cursor:
        cursor.execute("SELECT pg_walfile_name(pg_create_restore_point(%s))", [name])
        return str(cursor.fetchone()[0])


async def until_archived(settings: Settings, file: str) -> None:
    def archived() -> bool:
        with administering(superuser_url(settings)) as cursor:
            cursor.execute("SELECT pg_switch_wal()")
            cursor.execute(ARCHIVED, [file])
            return bool(cursor.fetchone()[0])

    async def is_archived() -> bool:
        return await asyncio.to_thread(archived)

    await until(is_archived, f"{file} in the archive")


def restore(settings: Settings, data: Path, backup: Path) -> None:
    """Replaces the server's files by the backup, which continues from the archive up to the named point."""
    embedded.down(settings)
    shutil.copytree(data / "archive", backup / "archive")
    (backup / "recovery.signal").touch()
    with (backup / "postgresql.auto.conf").open("a") as file:
        file.write(
            "restore_command = 'cp archive/%f %p'\nrecovery_target_name = 'before'\n"
            "recovery_target_action = promote\nhot_standby = off\n"
        )
    owner = data.stat()
    shutil.rmtree(data)
    shutil.move(backup, data)
    data.chmod(0o700)
    for folder, _, names in os.walk(data):
        for path in (Path(folder), *(Path(folder, name) for name in names)):
            os.chown(path, owner.st_uid, owner.st_gid)


def as_owner_of(folder: Path, path: Path) -> None:
    owner = folder.stat()
    os.chown(path, owner.st_uid, owner.st_gid)
