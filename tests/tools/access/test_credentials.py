"""Credentials: places, types, encryption, and silence about secret values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from noetl_dagster.errors import CredentialError
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.credential_types import CredentialType
from noetl_dagster.tools.access.credentials import Credentials, environment_name


def with_(settings: Settings, **changes: Any) -> Settings:
    return settings.model_copy(update=changes)


async def test_file_before_environment_before_table(
    settings: Settings, pool: asyncpg.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = SecretStr(Fernet.generate_key().decode())
    file = tmp_path / "credentials.yaml"
    file.write_text("api: {type: bearer, data: {token: from-file}}\n")
    own = with_(settings, credential_key=key, credentials_file=file)
    for name in ("api", "both", "stored"):
        await Credentials(own, pool).store(name, "bearer", {"token": "from-table"})
    for name in ("API", "BOTH"):
        monkeypatch.setenv(f"NOETL_CREDENTIAL_{name}", json.dumps({"type": "bearer", "token": "from-environment"}))

    credentials = Credentials(own, pool)

    assert (await credentials.get("api")).data == {"token": "from-file"}
    assert (await credentials.get("both")).data == {"token": "from-environment"}
    assert (await credentials.get("stored")).data == {"token": "from-table"}


async def test_table_holds_no_plain_secrets(settings: Settings, pool: asyncpg.Pool) -> None:
    own = with_(settings, credential_key=SecretStr(Fernet.generate_key().decode()))
    await Credentials(own, pool).store("db", "postgres", {"url": "postgresql://u:top-secret@h/d"})

    assert b"top-secret" not in bytes(await pool.fetchval("select data from noetl.credential"))
    other = with_(settings, credential_key=SecretStr(Fernet.generate_key().decode()))
    with pytest.raises(CredentialError, match="another key"):
        await Credentials(other, pool).get("db")
    with pytest.raises(CredentialError, match="NOETL_CREDENTIAL_KEY is not set"):
        await Credentials(settings, pool).get("db")


async def test_missing_one_names_every_place(settings: Settings, pool: asyncpg.Pool) -> None:
    with pytest.raises(CredentialError) as caught:
        await Credentials(settings, pool).get("records-api")

    for place in ("NOETL_CREDENTIALS_FILE", "NOETL_CREDENTIAL_RECORDS_API", "noetl.credential"):
        assert place in str(caught.value)


async def test_embedded_server_stands_in_for_postgres_only(settings: Settings) -> None:
    credentials = Credentials(with_(settings, default_postgres_credential="embedded"))

    found = await credentials.get("main_db", CredentialType.POSTGRES)

    assert found.data["url"] == settings.db_url
    with pytest.raises(CredentialError):
        await credentials.get("main_db", CredentialType.NATS)


async def test_urls_and_types(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment_name("pg.main"), "postgresql://u@h/d")
    monkeypatch.setenv(environment_name("api"), json.dumps({"type": "http bearer", "data": {"token": "t"}}))
    credentials = Credentials(settings)

    assert (await credentials.get("pg.main")).type is CredentialType.POSTGRES
    assert (await credentials.get("api")).type is CredentialType.BEARER
    with pytest.raises(CredentialError, match="of type bearer; postgres is needed"):
        await credentials.get("api", CredentialType.POSTGRES)


async def test_auth_by_alias(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment_name("pg"), "postgresql://u@h/d")
    monkeypatch.setenv(environment_name("api"), "http://h")
    credentials = Credentials(settings)

    one = await credentials.resolve({"credential": "pg"}, CredentialType.POSTGRES)
    of_two = await credentials.resolve(
        {"a": "api", "b": {"type": "postgres", "credential": "pg"}}, CredentialType.POSTGRES
    )

    assert one is not None
    assert of_two is not None
    assert one.name == of_two.name == "pg"
    assert await credentials.resolve(None) is None


async def test_nothing_shows_secrets(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment_name("db"), "postgresql://u:p%40ssw0rd@h/d")
    credentials = Credentials(settings)
    credential = await credentials.get("db")

    assert "ssw0rd" not in repr(credential)
    assert SECRETS.redact("x p%40ssw0rd y p@ssw0rd") == "x *** y ***"
    broken = tmp_path / "broken.yaml"
    broken.write_text("db: {type: postgres, data: {password: 'tops3cret}}")
    with pytest.raises(CredentialError) as caught:
        await Credentials(with_(settings, credentials_file=broken)).get("db")
    assert "tops3cret" not in str(caught.value)
    monkeypatch.setenv(environment_name("odd"), "tops3cret")
    with pytest.raises(CredentialError) as odd:
        await credentials.get("odd")
    assert "tops3cret" not in str(odd.value)


async def test_handles_open_only_for_the_call(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("API_TOKEN", "t0k3n-value")
    (tmp_path / "key").write_text("file-value\n")
    credentials = Credentials(with_(settings, secrets_path=tmp_path, playbook_env=("API_TOKEN",)))

    bearer = await credentials.resolve("secret://env/API_TOKEN", CredentialType.BEARER)
    header = await credentials.resolve({"type": "header", "header": "X", "value": "secret://file/key"})

    assert bearer is not None
    assert bearer.data["token"] == "t0k3n-value"
    assert header is not None
    assert header.data["value"] == "file-value"
    assert SECRETS.redact("t0k3n-value file-value") == "*** ***"
    with pytest.raises(CredentialError, match="outside"):
        await credentials.reveal("secret://file/../key")
