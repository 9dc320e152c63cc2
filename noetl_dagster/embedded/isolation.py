"""Settings for tests that run side by side: they share the servers and nothing else."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from noetl_dagster.embedded.postgres import administering
from noetl_dagster.settings import Settings


@contextmanager
def isolated(
    services: Settings, folder: Path, *, database: AbstractContextManager[str] | None = None
) -> Iterator[Settings]:
    """Yields settings with a database, bucket, volume, NATS names and state folder of their own.

    All but ``folder``, which contains the state and the volume, is deleted at the end.

    Args:
        services: settings with the addresses of running servers.
        database: yields the name of a database, which everything else has too; default: a new, empty one.
    """
    home, volume = folder / "home", folder / "pvc"
    home.mkdir()
    volume.mkdir()
    with database or new_database(services) as name:
        url = database_url(services, name)
        places = {"home": home, "pvc_mount_path": volume, "db_url": url, "dagster_db_url": url}
        names = {"nats_namespace": name, "minio_bucket": name}
        own = services.model_copy(update={**places, **names})
        try:
            yield own
        finally:
            _delete_bucket(own)
            asyncio.run(_delete_streams(own))


@contextmanager
def new_database(services: Settings) -> Iterator[str]:
    """Creates an empty database, yields its name and drops it at the end."""
    name = unique_name()
    with administering(database_url(services, "postgres")) as cursor:
        cursor.execute(f'CREATE DATABASE "{name}"')
        try:
            yield name
        finally:
            cursor.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def unique_name() -> str:
    """Returns a new name for a database, a bucket and NATS streams."""
    return f"test-{uuid.uuid4().hex[:12]}"


def database_url(services: Settings, database: str) -> str:
    """Returns the address of a database on the server that ``services`` names."""
    assert services.db_url is not None
    return f"{services.db_url.rpartition('/')[0]}/{database}"


def _delete_bucket(settings: Settings) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    secret = settings.minio_secret_key.get_secret_value()
    client = _s3_client(settings.minio_endpoint, settings.minio_access_key, secret, settings.minio_region)
    with suppress(ClientError, BotoCoreError):  # most tests never make it, some end the store
        client.delete_bucket(Bucket=settings.minio_bucket)  # the embedded store deletes its objects with it


@lru_cache(maxsize=1)
def _s3_client(endpoint: str | None, access_key: str, secret_key: str, region: str) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name=region,
        config=Config(retries={"max_attempts": 0}, connect_timeout=2, read_timeout=30),
    )


async def _delete_streams(settings: Settings) -> None:
    import nats

    assert settings.nats_url is not None
    client = await nats.connect(settings.nats_url, allow_reconnect=False)
    try:
        manager = client.jsm()
        for stream in await manager.streams_info():
            name = stream.config.name or ""
            if settings.nats_namespace.lower() in name.lower().replace("_", "-"):
                await manager.delete_stream(name)
    finally:
        await client.close()
