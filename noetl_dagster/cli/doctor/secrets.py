"""Checks of credentials."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import asyncpg
import obstore

from noetl_dagster.cli.doctor import Check, CheckResult, connects, not_set, ok, wrong
from noetl_dagster.errors import CredentialError
from noetl_dagster.events.connection import connect
from noetl_dagster.playbook.wording import listed
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.clients import Clients, open_bucket, postgres_arguments
from noetl_dagster.tools.access.credential_types import HTTP_TYPES, TOKEN_TYPES, CredentialType
from noetl_dagster.tools.access.credentials import Credentials

CONNECT_SECONDS = 5.0

UNKNOWN_OBJECT = "noetl-dagster-doctor"
"""No bucket has objects of this name."""


@asynccontextmanager
async def opened_credentials(settings: Settings) -> AsyncIterator[Credentials]:
    """Yields the credentials; those of the table only if the event log answers."""
    pool = None
    if settings.db_url is not None:
        with suppress(OSError, TimeoutError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError):
            pool = await asyncpg.create_pool(
                settings.db_url, min_size=1, max_size=2, connect=connect, timeout=CONNECT_SECONDS
            )
    clients = Clients(settings)
    try:
        yield Credentials(settings, pool, clients)
    finally:
        await clients.close()
        if pool is not None:
            pool.terminate()


async def credential_checks(settings: Settings, credentials: Credentials) -> list[Check]:
    """Returns a check of each credential, and one of their sources."""
    path = settings.credentials_file

    async def sources() -> CheckResult:
        names = await credentials.names()
        if path is None and not names:
            return not_set("NOETL_CREDENTIALS_FILE, and no credential elsewhere")
        return ok(f"{len(names)} known" + (f", file {path} is readable" if path is not None else ""))

    checks = [
        Check("credentials", sources, "check NOETL_CREDENTIALS_FILE"),
        Check("credential key", partial(_key, credentials), "check NOETL_CREDENTIAL_KEY"),
    ]
    with suppress(CredentialError, OSError, asyncpg.PostgresError):  # which the check above reports
        for name in await credentials.names():
            run = partial(_credential, name, settings, credentials)
            checks.append(Check(f"credential {name}", run, "correct the credential, or start its server"))
    return checks


async def _key(credentials: Credentials) -> CheckResult:
    """Decrypts what the table holds, also where a file or a variable has a credential of the same name."""
    encryption, sealed = credentials.encryption, await credentials.sealed()
    if (problem := encryption.key_problem) is not None:
        if sealed:
            remedy = "set it to the key with which they were stored, or store them again"
            return wrong(f"{problem}, and the database holds {listed(tuple(sealed))}", remedy)
        remedy = "correct it, or remove it: no credential is stored"
        return wrong(problem, remedy) if encryption.has_key else not_set("NOETL_CREDENTIAL_KEY")
    lost = []
    for name, data in sealed.items():
        try:
            encryption.unseal(name, data)
        except CredentialError:
            lost.append(name)
    if lost:
        return wrong(
            f"cannot decrypt {listed(tuple(lost))}, of {len(sealed)} in the database: stored with another key",
            "set NOETL_CREDENTIAL_KEY to that key, or store them again",
        )
    return ok(f"decrypts the {len(sealed)} credentials of the database")


async def _credential(name: str, settings: Settings, credentials: Credentials) -> CheckResult:
    try:
        credential = await credentials.get(name)
    except CredentialError as error:
        what, _, remedy = str(error).partition("; ")
        return wrong(what, remedy or "correct the credential")
    match credential.type:
        case CredentialType.POSTGRES:
            connection = await asyncpg.connect(**postgres_arguments(credential), timeout=CONNECT_SECONDS)
            try:
                database, user = await connection.fetchrow("SELECT current_database(), current_user")
            finally:
                await connection.close(timeout=CONNECT_SECONDS)
            return ok(f"postgres, {user} connects to {database}")
        case CredentialType.NATS:
            clients = Clients(settings)
            try:
                await clients.nats(credential, seconds=CONNECT_SECONDS)
            finally:
                await clients.close()
            return ok("nats, the server answers")
        case kind if kind in TOKEN_TYPES:
            await credentials.fields(name)
            return ok(f"{kind}, its server issues a token")
        case CredentialType.S3 if credential.get("bucket") is not None:
            store = open_bucket(settings, "s3", "", credential)
            await obstore.list_with_delimiter_async(store, prefix=UNKNOWN_OBJECT)
            return ok(f"s3, bucket {credential.get('bucket')} can be listed")
    url = credential.get("url", "base_url", "endpoint", "endpoint_url")
    if url is not None and (credential.type in HTTP_TYPES or credential.type is CredentialType.S3):
        place = await connects(str(url), 443 if str(url).startswith("https") else 80)
        return ok(f"{credential.type}, {place} answers; whether it accepts the secret is not tried")
    return ok(f"{credential.type}, can be read; it names no server to try")
