"""Clients that the tools of one process share: HTTP connections, PostgreSQL pools, NATS; buckets and clusters."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import asyncpg
import orjson
from obstore.store import GCSStore, S3Store

from noetl_dagster.errors import CredentialError, ServiceError, ToolError
from noetl_dagster.events.connection import host_addresses
from noetl_dagster.extras import needs_extra
from noetl_dagster.setting_types import separate_addresses
from noetl_dagster.settings import Settings
from noetl_dagster.storage.tiers.objects import minio_store, s3_client, s3_store
from noetl_dagster.tools.access.credential_types import Credential
from noetl_dagster.tools.access.destinations import DenyList
from noetl_dagster.tools.rows.columns import CODECS

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsClient

    from noetl_dagster.tools.access.web import Web

POSTGRES_POOL_SIZE = 8
POSTGRES_IDLE_SECONDS = 120.0
CONNECT_SECONDS = 10.0


@dataclass(slots=True)
class _Open:
    """The open clients of one event loop."""

    loop: asyncio.AbstractEventLoop
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    http: dict[bool, Web] = field(default_factory=dict)
    postgres: dict[str, asyncpg.Pool] = field(default_factory=dict)
    nats: dict[str, NatsClient] = field(default_factory=dict)
    statements: dict[int, dict[str, Any]] = field(default_factory=dict)


class Clients:
    """Opens clients on first use and reopens them when they were closed.

    One event loop is supported at a time: a call from another loop drops the clients of the earlier one.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._denied = DenyList.parse(settings.http_deny)
        self._state: _Open | None = None

    def http(self, *, verify_ssl: bool = True) -> Web:
        """Returns the shared HTTP sessions. Callers handle redirects and time-outs."""
        opened = self._open().http
        web = opened.get(verify_ssl)
        if web is None:
            from noetl_dagster.tools.access.web import Web

            web = opened[verify_ssl] = Web(self._denied, verify_ssl=verify_ssl)
        return web

    @property
    def body_bytes(self) -> int:
        """The largest body that is read whole."""
        return self._settings.http_body_bytes

    async def postgres(self, credential: Credential) -> asyncpg.Pool:
        """Returns a small pool on the database of a postgres credential; it parses ``json`` and ``jsonb``.

        Raises:
            CredentialError: the credential names no server.
        """
        arguments = postgres_arguments(credential)
        key = _fingerprint(arguments)
        state = self._open()
        pool = state.postgres.get(key)
        if pool is not None and not pool.is_closing():
            return pool
        async with state.opening:
            pool = state.postgres.get(key)
            if pool is None or pool.is_closing():
                state.statements.pop(id(pool), None)
                pool = await asyncpg.create_pool(
                    **arguments,
                    min_size=0,
                    max_size=POSTGRES_POOL_SIZE,
                    max_inactive_connection_lifetime=POSTGRES_IDLE_SECONDS,
                    timeout=CONNECT_SECONDS,
                    init=_prepare_connection,
                )
                state.postgres[key] = pool
        return pool

    async def connect_postgres(self, credential: Credential) -> asyncpg.Connection:
        """Returns a connection as those of :meth:`postgres`, outside of the pool; the caller closes it."""
        connection = await asyncpg.connect(**postgres_arguments(credential), timeout=CONNECT_SECONDS)
        try:
            await _prepare_connection(connection)
        except BaseException:
            connection.terminate()
            raise
        return connection

    def statements(self, pool: asyncpg.Pool) -> dict[str, Any]:
        """Returns the cached facts about statements that ran on a pool of :meth:`postgres`, by their text."""
        return self._open().statements.setdefault(id(pool), {})

    async def nats(self, credential: Credential | None = None, *, seconds: float | None = None) -> NatsClient:
        """Returns a connection to the NATS server of a credential, or to that of the settings.

        Args:
            seconds: time limit of a new connection; default: :data:`CONNECT_SECONDS`.

        Raises:
            ServiceError: no server is known or reachable.
        """
        arguments = self._nats_arguments(credential)
        key = _fingerprint(arguments)
        state = self._open()
        async with state.opening:
            client = state.nats.get(key)
            if client is None or client.is_closed:
                import nats

                seconds = seconds or CONNECT_SECONDS
                try:
                    client = await nats.connect(
                        **arguments,
                        connect_timeout=seconds,
                        max_reconnect_attempts=max(1, round(seconds)),  # which are 2 s apart
                    )
                except Exception as error:
                    where = credential.name if credential else "NOETL_NATS_URL"
                    raise ServiceError(f"NATS server of {where} cannot be reached: {error!r}") from None
                state.nats[key] = client
        return client

    async def close(self) -> None:
        """Closes all clients. The object may be used again afterwards."""
        state, self._state = self._state, None
        if state is None or state.loop is not asyncio.get_running_loop():
            return
        for web in state.http.values():
            await web.close()
        for connection in state.nats.values():
            with contextlib.suppress(Exception):
                await connection.close()
        for pool in state.postgres.values():
            try:
                await asyncio.wait_for(pool.close(), CONNECT_SECONDS)
            except (TimeoutError, asyncpg.PostgresError, OSError):
                pool.terminate()

    def _open(self) -> _Open:
        loop = asyncio.get_running_loop()
        if self._state is None or self._state.loop is not loop:
            self._state = _Open(loop)
        return self._state

    def _nats_arguments(self, credential: Credential | None) -> dict[str, Any]:
        if credential is None:
            if self._settings.nats_url is None:
                raise ServiceError("no NATS server is known; set NOETL_NATS_URL or name a nats credential")
            return {"servers": self._settings.nats_servers, "tls": self._settings.nats_tls}
        url = credential.get("url", "servers", "nats_url")
        if url is None:
            raise CredentialError(f"credential {credential.name!r} of type nats has no 'url'")
        optional = {
            "user": credential.get("user", "username", "nats_user"),
            "password": credential.get("password", "nats_password"),
            "token": credential.get("token"),
        }
        servers = separate_addresses(url) if isinstance(url, str) else url
        return {"servers": servers, **{key: value for key, value in optional.items() if value is not None}}


def postgres_arguments(credential: Credential) -> dict[str, Any]:
    """Returns the arguments of ``asyncpg.connect`` for a postgres credential: ``url``, or host, port, user and others.

    Of several hosts it takes the one that accepts writes, unless the address has ``target_session_attrs``.

    Raises:
        CredentialError: it has neither ``url`` nor ``host``.
    """
    url = credential.get("url", "dsn", "connection_string", "uri")
    if url is not None:
        dsn = str(url).replace("postgresql+psycopg2://", "postgresql://", 1)
        if len(host_addresses(dsn)) == 1 or "target_session_attrs" in dsn:
            return {"dsn": dsn}
        return {"dsn": dsn, "target_session_attrs": "read-write"}
    host = credential.get("host", "db_host")
    if host is None:
        raise CredentialError(f"credential {credential.name!r} of type postgres has neither 'url' nor 'host'")
    optional = {
        "user": credential.get("user", "username", "db_user"),
        "password": credential.get("password", "db_password"),
        "database": credential.get("database", "dbname", "db_name"),
        "ssl": credential.get("sslmode", "ssl"),
    }
    port = int(credential.get("port", "db_port", default=5432))
    return {"host": host, "port": port, **{key: item for key, item in optional.items() if item is not None}}


def connect_cluster(asker: str, right: str) -> tuple[Any, Any]:
    """Returns the configured Kubernetes cluster's clients of jobs (``BatchV1Api``) and of pods (``CoreV1Api``).

    Args:
        asker: the caller, for error messages.
        right: how the caller gets the right that it needs.

    Raises:
        ToolError: no client is installed, or no cluster is configured.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        raise ToolError(needs_extra(asker, "k8s"), kind="policy") from None
    try:
        try:
            config.load_kube_config()
        except config.ConfigException:  # else the pod's own service account
            config.load_incluster_config()
    except config.ConfigException:
        raise ToolError(
            f"{asker}: no Kubernetes client is configured; set KUBECONFIG, or run inside a cluster; {right}",
            kind="credential",
        ) from None
    configuration = client.Configuration.get_default_copy()
    configuration.retries = 0  # the callers repeat their requests
    api = client.ApiClient(configuration)
    return client.BatchV1Api(api), client.CoreV1Api(api)


def open_bucket(settings: Settings, kind: str, bucket: str, credential: Credential | None = None) -> Any:
    """Returns an obstore client of a bucket.

    Args:
        kind: ``s3`` (also ``minio``) or ``gcs``.
        bucket: its name; empty: the one of the credential or the settings.
        credential: None: the settings' minio endpoint for s3 if there is one, else the environment.

    Raises:
        CredentialError: no bucket is named.
    """
    name = bucket_name(settings, kind, bucket, credential)
    return _gcs(name, credential) if kind == "gcs" else _s3(settings, name, credential)


def bucket_name(settings: Settings, kind: str, bucket: str, credential: Credential | None) -> str:
    """Returns the bucket that :func:`open_bucket` opens; raises ``CredentialError`` if none is named."""
    own = credential.get("bucket", default="") if credential else ""
    default = settings.gcs_bucket if kind == "gcs" else settings.minio_bucket
    name = bucket or own or default
    if not name:
        raise CredentialError(f"no bucket is named for {kind}; write it in the path or in the credential")
    return str(name)


def google_account(credential: Credential | None) -> str | None:
    """Returns the key of a gcs credential's service account as JSON; None: the Google environment's is used.

    Raises:
        CredentialError: the file that it names cannot be read.
    """
    if credential is None:
        return None
    key = credential.get("service_account_key", "service_account_json", "service_account", "key")
    path = credential.get("service_account_path", "keyfile")
    if key is None and path is not None:
        try:
            key = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise CredentialError(f"credential {credential.name!r}: {path} cannot be read: {error}") from None
    return key if key is None or isinstance(key, str) else orjson.dumps(key).decode()


def google_token(credential: Credential | None) -> str | None:
    """Returns the access token of a gcs credential, which has been exchanged for a credential of another type."""
    return None if credential is None else credential.get("token", "access_token")


def _s3(settings: Settings, bucket: str, credential: Credential | None) -> S3Store:
    if credential is None:
        return (minio_store if settings.minio_endpoint else s3_store)(settings, bucket, patient=True)
    config = {
        "access_key_id": credential.get("access_key_id", "access_key", "key_id"),
        "secret_access_key": credential.get("secret_access_key", "secret_key", "secret"),
        "session_token": credential.get("session_token"),
        "region": credential.get("region", default=settings.minio_region),
    }
    return s3_client(bucket, credential.get("endpoint", "endpoint_url"), config)


def _gcs(bucket: str, credential: Credential | None) -> GCSStore:
    config = {"service_account_key": google_account(credential), "bearer_token": google_token(credential)}
    return GCSStore(bucket, config=cast(Any, {name: value for name, value in config.items() if value is not None}))


async def _prepare_connection(connection: asyncpg.Connection) -> None:
    """Sets the codecs of the columns' types, with which a sink and its completion can share a transaction."""
    for name, (format, encoder, decoder) in CODECS.items():
        await connection.set_type_codec(name, schema="pg_catalog", encoder=encoder, decoder=decoder, format=format)


def _fingerprint(arguments: dict[str, Any]) -> str:
    """Returns a dictionary key for connection arguments that does not contain their secrets."""
    return hashlib.blake2b(repr(sorted(arguments.items())).encode(), digest_size=16).hexdigest()
