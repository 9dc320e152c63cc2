"""Secrets of an execution that is killed and resumed: afterwards, they are nowhere in what it has left."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import boto3
import lz4.frame
import orjson
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from cryptography.fernet import Fernet
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.transport.nats import connect
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.tools.access.credential_types import CredentialType
from tests.chaos.secrets import PIECE, forms_of, search
from tests.cli.conftest import Cli, cli, environment
from tests.cli.kills import killed_at
from tests.conftest import HOME
from tests.forked import Forked
from tests.playbooks import playbook, text_of
from tests.service.conftest import Service, serving
from tests.serving import served

__all__ = ["cli", "environment"]

PLANTED = f"c\u00e4nary+{uuid.uuid4().hex}/'q\"=="


# -- the search finds what is there ---------------------------------------------------------------------


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


# -- and finds nothing ------------------------------------------------------------------------------------

SESSION = f"tok_{uuid.uuid4().hex}{uuid.uuid4().hex}"
PIN = f"{uuid.uuid4().hex}/\"\u00f6+&'"
PASSWORD = f"pg-{uuid.uuid4().hex}"
KEY = f"key-{uuid.uuid4().hex}"

FLOW = """
    keychain: [{name: vault, credential: vault}]
    workload: {api: ""}
    workflow:
"""
TOOLS = {
    "header": "{kind: http, url: '{{ api }}/refused', headers: {Authorization: 'Bearer {{ keychain.vault.session }}'}}",
    "credential": "{kind: http, url: '{{ api }}/refused', auth: login}",
    "redirected": "{kind: http, url: '{{ api }}/elsewhere', params: {key: '{{ keychain.vault.session }}'}}",
    "address": "{kind: http, url: 'http://127.0.0.1:1/{{ keychain.vault.pin | urlencode }}'}",
    "password": "{kind: postgres, auth: database, query: SELECT 1}",
    "query": "{kind: postgres, auth: pg, query: 'SELECT $1::int', params: ['{{ keychain.vault.session }}']}",
    "raised": "{kind: python, input: {x: '{{ keychain.vault.pin }}'}, code: 'raise ValueError([x, repr(x)])'}",
    "own_process": (
        "{kind: python, spec: {isolation: subprocess}, input: {x: '{{ keychain.vault.session }}'}, "
        "code: 'raise ValueError(x.encode())'}"
    ),
    "printed": "{kind: python, input: {x: '{{ keychain.vault.pin }}'}, code: 'print(x); result = len(x)'}",
    "shell": "{kind: shell, env: {P: '{{ keychain.vault.session }}'}, cmds: 'env; echo \"$P\" >&2; exit 3'}",
}
"""Ways in which the tools meet secrets. Each result has none, and each error would quote one."""

ELSEWHERE = ("header", "raised", "own_process", "shell", "password")
"""Those that a worker runs too."""

LOOP = """
      - step: loop
        spec: {dispatch: workers}
        loop: {in: "{{ range(5) | list }}", iterator: n, mode: parallel}
        tool: {kind: python, input: {x: "{{ keychain.vault.session }}"}, code: "print(x); result = len(x)"}
"""


def flow() -> str:
    """Each step follows the one before, whether that failed or not."""
    steps = [(name, tool, "") for name, tool in TOOLS.items()]
    steps += [(f"{name}_elsewhere", TOOLS[name], "\n        spec: {dispatch: workers}") for name in ELSEWHERE]
    names = [name for name, *_ in steps]
    lines = [
        f"      - step: {name}{spec}\n        tool: {tool}\n        next: [{{step: {following}, when: '{{{{ true }}}}'}}]"
        for (name, tool, spec), following in zip(steps, [*names[1:], "loop"], strict=True)
    ]
    return FLOW + "\n".join(lines) + LOOP


def _application() -> Starlette:
    async def refused(request: Request) -> Response:
        return Response(f"{request.url} {dict(request.headers)}", 422, {"x-echo": str(dict(request.headers))})

    async def elsewhere(request: Request) -> Response:
        return RedirectResponse(f"http://127.0.0.1:1/gone?{request.url.query}")

    return Starlette(routes=[Route("/refused", refused), Route("/elsewhere", elsewhere)])


@pytest.fixture
async def secretive(settings: Settings, environment: dict[str, str]) -> AsyncIterator[Settings]:
    """Settings of an installation that has credentials; the environment of its processes has the same."""
    key = Fernet.generate_key().decode()
    environment |= {
        "NOETL_CREDENTIAL_KEY": key,
        "NOETL_DEFAULT_POSTGRES_CREDENTIAL": "embedded",
        "NOETL_DEFAULT_STORE_TIER": StoreTier.MINIO.value,
        "NOETL_LOG_LEVEL": "DEBUG",
    }
    own = settings.model_copy(update={"credential_key": SecretStr(key)})
    assert settings.db_url is not None
    host = settings.db_url.rpartition("@")[2].partition("/")[0]
    engine = await Engine.open(own)
    store = engine.runtime.tool_context.credentials.store
    await store("vault", CredentialType.SECRET, {"pin": PIN, "session": SESSION})
    await store("login", CredentialType.BEARER, {"token": KEY})
    database = {"host": host.partition(":")[0], "port": int(host.partition(":")[2]), "user": "etl", "database": "x"}
    await store("database", CredentialType.POSTGRES, database | {"password": PASSWORD})
    await engine.close()
    yield own
    SECRETS.forget()


@pytest.mark.slow
async def test_a_killed_and_resumed_execution_leaves_no_secret(
    cli: Cli, secretive: Settings, environment: dict[str, str], pool: asyncpg.Pool[Any], tmp_path: Path
) -> None:
    file, outputs = tmp_path / "canaries.yaml", tmp_path / "outputs"
    outputs.mkdir()
    with served(_application()) as api:
        file.write_text(text_of("canaries", flow()).replace('api: ""', f'api: "{api}"'))
        worker = Forked("noetl-dagster", "worker", environment=environment, folder=tmp_path, output=outputs / "worker")
        try:
            condition = "NEW.event_type = 'step.enter' AND NEW.node_name = 'own_process_elsewhere'"
            await killed_at(condition, ["run", str(file)], environment, tmp_path, pool)
            execution_id = await pool.fetchval("SELECT max(execution_id) FROM noetl.event")
            resumed = await asyncio.to_thread(cli, "resume", str(execution_id), "--json")
            async with serving(secretive) as service:
                found = await search(
                    secretive,
                    [SESSION, PIN, PASSWORD, KEY],
                    [tmp_path, *await asyncio.to_thread(_logs_of_servers)],
                    pages=service.client,
                    execution_ids=[execution_id],
                    pids=[worker.pid],
                )
        finally:
            worker.kill()
            worker.communicate()
    assert orjson.loads(resumed.stdout)["status"] == "COMPLETED", resumed.stderr
    assert found == []
    errors = await pool.fetch(
        "SELECT node_name FROM noetl.event WHERE event_type = 'command.failed' AND error LIKE '%***%'"
    )
    assert {row["node_name"] for row in errors} >= {"header", "raised", "raised_elsewhere", "address"}


def _logs_of_servers() -> list[Path]:
    """The logs of PostgreSQL, NATS and the object store, and what NATS has stored."""
    return [HOME / "nats", *HOME.glob("*/log")]
