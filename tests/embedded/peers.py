"""For each service, a client that writes a text and reads it back, the way the product's own clients do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import asyncpg
import boto3
import nats
from botocore.client import BaseClient
from botocore.config import Config

from noetl_dagster.embedded import ServiceName
from noetl_dagster.settings import Settings

ATTEMPTS = 10
"""Of a request: a disk that stands still for seconds makes a new bucket's first object wait."""


@dataclass(frozen=True)
class Peer:
    write: Callable[[Settings, str], Awaitable[None]]
    read: Callable[[Settings], Awaitable[str]]


async def _write_row(settings: Settings, text: str) -> None:
    connection = await asyncpg.connect(settings.db_url)
    await connection.execute("CREATE TABLE IF NOT EXISTS kept (text text)")
    await connection.execute("INSERT INTO kept VALUES ($1)", text)
    await connection.close()


async def _read_row(settings: Settings) -> str:
    connection = await asyncpg.connect(settings.db_url)
    found = await connection.fetchval("SELECT text FROM kept ORDER BY ctid DESC LIMIT 1")
    await connection.close()
    return str(found)


async def _write_message(settings: Settings, text: str) -> None:
    client = await nats.connect(settings.nats_url or "")
    stream = client.jetstream()
    await stream.add_stream(name="KEPT", subjects=["kept"])
    await stream.publish("kept", text.encode())
    await client.close()


async def _read_message(settings: Settings) -> str:
    client = await nats.connect(settings.nats_url or "")
    message = await client.jetstream().get_last_msg("KEPT", "kept")
    await client.close()
    return (message.data or b"").decode()


def s3_client(settings: Settings) -> BaseClient:
    return boto3.client(
        "s3",
        endpoint_url=settings.minio_endpoint,
        aws_access_key_id=settings.minio_access_key,
        aws_secret_access_key=settings.minio_secret_key.get_secret_value(),
        region_name=settings.minio_region,
        config=Config(retries={"mode": "standard", "max_attempts": ATTEMPTS}),
    )


async def _write_object(settings: Settings, text: str) -> None:
    client = s3_client(settings)
    client.create_bucket(Bucket=f"bucket-{text}")
    client.put_object(Bucket=f"bucket-{text}", Key="kept", Body=text.encode() * 10_000)


async def _read_object(settings: Settings) -> str:
    client = s3_client(settings)
    newest = max(client.list_buckets()["Buckets"], key=lambda bucket: bucket["CreationDate"])["Name"]
    text = newest.removeprefix("bucket-")
    assert client.get_object(Bucket=newest, Key="kept")["Body"].read() == text.encode() * 10_000
    return str(text)


PEERS = {
    ServiceName.POSTGRES: Peer(_write_row, _read_row),
    ServiceName.NATS: Peer(_write_message, _read_message),
    ServiceName.OBJECT_STORE: Peer(_write_object, _read_object),
}
