"""The search for secrets with which chaos campaigns end finds them in each kind of place."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import sys
import uuid
from pathlib import Path
from typing import Any

import boto3
import lz4.frame
import pyarrow as pa
import pyarrow.parquet
import zstandard

from noetl_dagster.events.transport.nats import connect
from noetl_dagster.settings import Settings
from tests.chaos.secrets import PIECE, forms_of, search
from tests.playbooks import playbook
from tests.service.conftest import Service, serving

PLANTED = f"c\u00e4nary+{uuid.uuid4().hex}/'q\"=="


def files(folder: Path) -> dict[str, bytes]:
    """The places of a secret in files, by what must be found."""
    table = io.BytesIO()
    pyarrow.parquet.write_table(
        pa.table({"a": [1], "b": [PLANTED * 3]}), table, compression="zstd", use_dictionary=False
    )
    long = b"x" * (PIECE - 20) + PLANTED.encode() + b"x" * PIECE
    return {
        **{f"{form}-{number}": b"a" + needle + b"b" for number, (form, needle) in enumerate(forms_of(PLANTED))},
        "at-the-end-of-a-piece": long,
        "hs_err_pid1.log": b"\0" * 100 + PLANTED.encode("utf-16-le"),
        "core": bytes(PIECE) + PLANTED.encode() + bytes(PIECE),
        "log.gz": gzip.compress(long),
        "log-cut-off.gz": gzip.compress(PLANTED.encode() + b"x" * 100_000)[:-40],
        "eventlog.zstd": zstandard.compress(long),
        "block.lz4": lz4.frame.compress(long),
        "part.parquet": table.getvalue(),
        "basic": b"Basic " + base64.b64encode(f"me:{PLANTED}".encode()),
    }


async def test_a_planted_secret_is_found_in_each_kind_of_place(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    planted = files(folder)
    for name, content in planted.items():
        (folder / name).write_bytes(content)
    (folder / "only-names").mkdir()
    (folder / "only-names" / PLANTED.replace("/", "-").encode().hex()).touch()
    program = [sys.executable, "-c", "input()", PLANTED]
    child = await asyncio.create_subprocess_exec(*program, env={"KEY": PLANTED}, stdin=asyncio.subprocess.PIPE)
    async with serving(settings) as service:
        places = {one.place for one in await _search(service, folder, await _planted(service), [child.pid])}
    child.kill()
    await child.wait()
    missing = [name for name in planted if not any(str(folder / name) in place for place in places)]
    assert missing == []
    for part in (
        *("table noetl.event", "table public.notes", "table public.packed, decompressed", "stream KV_", "stream "),
        *("object plain", "object packed, decompressed", "object table, as a table", "name of object"),
        *("cmdline of process", "environ of process", "page /executions/", "page /api/"),
    ):
        assert any(place.startswith(part) for place in places), (part, sorted(places))


async def _search(service: Service, folder: Path, execution_id: int, pids: list[int]) -> list[Any]:
    return await search(
        service.settings, [PLANTED], [folder], pages=service.client, execution_ids=[execution_id], pids=pids
    )


async def _planted(service: Service) -> int:
    """Puts the secret into the services, and returns an execution that contains it."""
    settings, pool = service.settings, service.plane.engine.runtime.pool
    text = "workload: {a: ''}\nworkflow: [{step: start, tool: {kind: noop}}]\n"
    state = await service.plane.engine.run(playbook(text), {"a": PLANTED})
    await pool.execute("CREATE TABLE notes AS SELECT $1::text AS note", f"a{PLANTED}b")
    await pool.execute("CREATE TABLE packed AS SELECT $1::bytea AS note", zstandard.compress(PLANTED.encode() * 50_000))
    client = await connect(settings, "test")
    stream = client.jetstream()
    name = settings.nats_namespace
    bucket = await stream.create_key_value(bucket=f"{name}-planted")
    await bucket.put("key", PLANTED.encode())
    await stream.add_stream(name=f"{name}-planted", subjects=[f"{name}.planted"])
    await stream.publish(f"{name}.planted", gzip.compress(PLANTED.encode()))
    await client.close()
    await asyncio.to_thread(_plant_objects, settings)
    return state.execution_id


def _plant_objects(settings: Settings) -> None:
    store = boto3.client(
        "s3",
        endpoint_url=settings.minio_endpoint,
        aws_access_key_id=settings.minio_access_key,
        aws_secret_access_key=settings.minio_secret_key.get_secret_value(),
        region_name=settings.minio_region,
    )
    store.create_bucket(Bucket=settings.minio_bucket)
    table = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"a": [PLANTED]}), table, compression="gzip")
    named = PLANTED.encode().hex()
    for key, content in {"plain": PLANTED.encode(), "packed": gzip.compress(PLANTED.encode()), named: b"",
                         "table": table.getvalue()}.items():  # fmt: skip
        store.put_object(Bucket=settings.minio_bucket, Key=key, Body=content)
